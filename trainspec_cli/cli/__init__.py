"""The command line: one file per command. Parse, make one call, print."""

MODULES = {"import": "import_recipe"}
"""Commands whose name no function can have -> their module and its function."""
