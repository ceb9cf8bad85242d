"""Files, folders and data sets in every layout that users have -> checked texts of rows."""
