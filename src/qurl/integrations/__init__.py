"""QuRL inside other projects: each module needs the package that it is named after."""
