"""Servers for training at distant sites. They run next to the supervisors: the meeting point at site 0, inboxes at
other sites."""
