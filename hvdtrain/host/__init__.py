"""The machine, and the launcher that started the process. Of hvdtrain, it imports only errors."""
