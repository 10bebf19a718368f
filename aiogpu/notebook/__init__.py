"""What aiogpu shows in a notebook: objects as HTML, progress, output by cell.

Imports neither IPython nor tqdm unless the program runs in a notebook.
"""
