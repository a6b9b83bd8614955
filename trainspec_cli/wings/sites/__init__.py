"""The servers of far-apart sites, beside their supervisors: the meeting point at site 0, inboxes elsewhere."""
