"""One foreign thing each: files, processes, sockets, clocks. They never import one another (durable excepted), nor the flow."""
