"""A page for a browser that shows a live run or a served model. It surveys the run, and changes nothing there."""
