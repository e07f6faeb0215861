"""Dynamic Communication Thresholding (arXiv 2010.08899) and what it is compared with: fewer bytes on the wire."""
