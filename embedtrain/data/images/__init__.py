"""Pictures in the texts of rows and corpora: references, files, and what a model gets of them."""
