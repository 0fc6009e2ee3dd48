"""Commands around training: measuring, checking, searching, reporting. Nothing else imports them."""
