// Package openbao is a double of the OpenBao server: several processes that
// make one Raft cluster on disk, and that answer the part of the HTTP API
// which a replacement of the members goes through as the real servers 2.5 and
// 2.6 do. The recordings in testdata say how those answered; a test compares
// both with them.
//
// What is like the real one: a sealed member is out of Raft and hides the
// cluster; followers tell the active member of themselves every five seconds
// and autopilot knows no more than that; a step-down is carried out long after
// it was answered; 2.5 and 2.6 forward nothing to each other.
//
// What is not: an active member that is killed is missed after five to ten
// seconds, where the real ones took seventeen; secrets are not encrypted, the
// root token is the only one, and the cluster port speaks no TLS. It holds
// nothing that anybody may rely on to keep a secret. It must not know what
// starts its servers and replaces them.
package openbao
