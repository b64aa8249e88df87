"""One condition language for rows of Arrow tables and for rows of prompt files."""
