"""How the processes of one job talk: what they say is believed only after both ends have proved that they know its
secret."""
