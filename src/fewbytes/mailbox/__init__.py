"""Messages that travel as files: sealed for one receiver, in a folder or an object store."""
