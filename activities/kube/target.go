// Package kube reaches Kubernetes clusters by name and proves, on every call,
// that the API server it reached is the one the run began with (design,
// contract 10). It holds connections, identity, server-side apply, watches with
// deadlines, tunnels to pods and commands in them; it must not know
// TensorFusion, Helm or NVCF.
package kube

// Target names a cluster as the worker's configuration does, with the UID of
// its namespace kube-system as recorded by the run's first stage. Every
// request of a cluster activity carries it; an empty UID is allowed only in
// Identify.
type Target struct {
	Cluster string `json:"cluster"`
	UID     string `json:"uid,omitempty"`
}
