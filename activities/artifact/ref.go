// Package artifact keeps what is too big or too sensitive for workflow
// history in an object store: secret things encrypted with age, evidence in
// the clear, both verified by digest (design, contract 9). It must not know
// what it stores.
package artifact

// Kind decides whether an artifact is encrypted.
type Kind string

const (
	// Secret artifacts (values, manifests, Secrets) are always encrypted.
	Secret Kind = "secret"
	// Evidence artifacts (receipts, observations) hold nothing sensitive.
	Evidence Kind = "evidence"
)

// Ref is all that workflow history holds of an artifact.
type Ref struct {
	Name string `json:"name"`
	Kind Kind   `json:"kind"`
	URL  string `json:"url"`
	// Size is the stored object's length in bytes.
	Size int64 `json:"size"`
	// PlainSHA256 is the digest of the plaintext stream, taken before
	// encryption; StoredSHA256 that of the object as re-read from the store.
	PlainSHA256  string `json:"plainSHA256"`
	StoredSHA256 string `json:"storedSHA256"`
	// Entries counts what the writer put in (objects, files).
	Entries int `json:"entries"`
}
