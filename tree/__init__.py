"""The draft tree and how it grows; knows no model and no request."""
