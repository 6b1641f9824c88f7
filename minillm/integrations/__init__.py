"""Plug-ins of other tools, which find them by their entry points: nothing else imports these modules."""
