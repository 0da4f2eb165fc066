package kube

// Inside is the client of a worker that runs in the client's own cluster.
func Inside(c *Client) *Client {
	c.inside = true
	return c
}
