"""The `bitline` command. main.py declares it; each sub-command's work is in a file of its name, imported when it is called."""
