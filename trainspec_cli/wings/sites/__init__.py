"""The servers of far-apart sites, next to their supervisors: the meeting point at site 0, inboxes elsewhere."""
