"""A folder that installs trainspec and trains where no network is: wheels, recipes, data, a list of what is in it."""
