"""The order of a step as text, JSON and a picture: what each scheduling line came to, and what is exposed."""
