"""What a run leaves for people: a trace, a drawing, idle seconds by cause, one HTML page, pages that compare runs."""
