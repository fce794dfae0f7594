"""Pages and pictures of packs and data: HTML from templates, plots. Nothing below imports them."""
