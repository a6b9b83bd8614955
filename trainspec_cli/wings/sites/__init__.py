"""The servers of distant sites, which run next to the supervisors: the meeting point at site 0, and inboxes
elsewhere."""
