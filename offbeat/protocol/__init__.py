"""What server and workers say, and what each does next: no sockets, threads or clocks."""
