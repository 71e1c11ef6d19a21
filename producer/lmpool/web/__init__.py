"""Pages and answers over HTTP about a pool; may import what asks one."""
