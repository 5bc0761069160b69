"""Workers that Ray places, starts and watches; what they compute travels over offbeat's links."""
