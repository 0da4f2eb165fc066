package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/url"
	"path/filepath"
	"sort"
	"strings"

	"filippo.io/age"
	"gocloud.dev/blob"
	_ "gocloud.dev/blob/fileblob" // the store of one host; package cloud links s3 and gs
	"gocloud.dev/gcerrors"

	"github.com/refit-run/refit/activities/finding"
)

const (
	// sealedSuffix ends the key of an encrypted object.
	sealedSuffix = ".age"
	// refSuffix ends the key of the small object that holds an artifact's Ref.
	refSuffix = ".ref.json"
)

// Store keeps artifacts in one bucket. Get needs no recipients, Put of a
// Secret does.
type Store struct {
	bucket     *blob.Bucket
	base       string
	recipients []age.Recipient
}

// Open opens the bucket of a gocloud URL (file:///path, s3://bucket?region=..,
// gs://bucket) or of a folder. Recipients are age public keys; without any,
// secret artifacts are refused.
func Open(address string, recipients []string) (*Store, error) {
	var keys []age.Recipient
	if text := strings.TrimSpace(strings.Join(recipients, "\n")); text != "" {
		var err error
		if keys, err = age.ParseRecipients(strings.NewReader(text)); err != nil {
			return nil, fmt.Errorf("age recipients of the artifact store: %w", err)
		}
	}
	if !strings.Contains(address, "://") {
		folder, err := filepath.Abs(address)
		if err != nil || address == "" {
			return nil, fmt.Errorf("artifact store %q: expected a URL or a folder", address)
		}
		address = "file://" + filepath.ToSlash(folder)
	}
	u, err := url.Parse(address)
	if err != nil {
		return nil, fmt.Errorf("artifact store: %w", err)
	}
	base := *u
	base.RawQuery = ""
	if u.Scheme == "file" {
		// Written beside its final place: a rename across file systems fails.
		// Metadata files would only repeat what the Ref holds.
		query := u.Query()
		query.Set("create_dir", "true")
		query.Set("dir_file_mode", "0700")
		query.Set("no_tmp_dir", "true")
		query.Set("metadata", "skip")
		u.RawQuery = query.Encode()
	}
	bucket, err := blob.OpenBucket(context.Background(), u.String())
	if err != nil {
		return nil, fmt.Errorf("artifact store %s: %w", base.String(), err)
	}
	return &Store{bucket: bucket, base: strings.TrimSuffix(base.String(), "/") + "/", recipients: keys}, nil
}

// Close releases the bucket's connections.
func (s *Store) Close() error { return s.bucket.Close() }

// CheckRecipients fails when secret artifacts could not be encrypted; a
// preflight calls it so that a run stops before it touches anything.
func (s *Store) CheckRecipients() error {
	if len(s.recipients) > 0 {
		return nil
	}
	return finding.Finding{
		Object:   "artifact store " + s.base,
		Expected: "at least one age recipient",
		Found:    "none",
		Why:      "backups hold Secrets and values and are never stored in the clear",
		Next:     "make a key with `age-keygen`, give its public key to the worker in REFIT_AGE_RECIPIENTS and keep the identity file elsewhere",
	}.Error(finding.Stop)
}

// Put streams what write writes into the object key, encrypted when kind is
// Secret, reads it back and compares. entries counts what the writer put in.
// A Put of the same plaintext under the same key answers the stored Ref; of
// another plaintext it replaces the object.
func (s *Store) Put(ctx context.Context, key string, kind Kind, entries int, write func(io.Writer) error) (Ref, error) {
	name := strings.TrimPrefix(key, "/")
	ref := Ref{Name: name, Kind: kind, Entries: entries}
	stored := name
	switch kind {
	case Secret:
		if err := s.CheckRecipients(); err != nil {
			return Ref{}, err
		}
		stored += sealedSuffix
	case Evidence:
	default:
		return Ref{}, fmt.Errorf("artifact %q: unknown kind %q", name, kind)
	}
	ref.URL = s.base + stored

	// Cancelling before Close is how a blob is not committed.
	writing, discard := context.WithCancel(ctx)
	defer discard()
	w, err := s.bucket.NewWriter(writing, stored, &blob.WriterOptions{ContentType: "application/octet-stream"})
	if err != nil {
		return Ref{}, s.wrap(err, "write", stored)
	}
	object := &counter{w: w, hash: sha256.New()}
	if ref.PlainSHA256, err = s.encode(object, kind, write); err != nil {
		discard()
		w.Close()
		return Ref{}, s.wrap(err, "write", stored)
	}
	ref.Size, ref.StoredSHA256 = object.n, object.sum()
	if former, err := s.readRef(ctx, stored); err == nil && former.PlainSHA256 == ref.PlainSHA256 && former.Entries == entries {
		if s.verify(ctx, stored, former) == nil {
			discard()
			w.Close()
			return former, nil
		}
	}
	if err := w.Close(); err != nil {
		return Ref{}, s.wrap(err, "write", stored)
	}
	if err := s.verify(ctx, stored, ref); err != nil {
		return Ref{}, err
	}
	note, err := json.Marshal(ref)
	if err != nil {
		return Ref{}, err
	}
	if err := s.bucket.WriteAll(ctx, stored+refSuffix, note, &blob.WriterOptions{ContentType: "application/json"}); err != nil {
		return Ref{}, s.wrap(err, "write", stored+refSuffix)
	}
	return ref, nil
}

// encode runs write and returns the plaintext's digest.
func (s *Store) encode(object io.Writer, kind Kind, write func(io.Writer) error) (string, error) {
	plain := &counter{w: object, hash: sha256.New()}
	var seal io.WriteCloser
	if kind == Secret {
		var err error
		if seal, err = age.Encrypt(object, s.recipients...); err != nil {
			return "", err
		}
		plain.w = seal
	}
	if err := write(plain); err != nil {
		return "", err
	}
	if seal != nil {
		if err := seal.Close(); err != nil {
			return "", err
		}
	}
	return plain.sum(), nil
}

// verify reads the object back and compares its bytes with the Ref.
func (s *Store) verify(ctx context.Context, stored string, ref Ref) error {
	r, err := s.bucket.NewReader(ctx, stored, nil)
	if err != nil {
		return s.wrap(err, "read back", stored)
	}
	defer r.Close()
	sum := sha256.New()
	n, err := io.Copy(sum, r)
	if err != nil {
		return s.wrap(err, "read back", stored)
	}
	if found := hex.EncodeToString(sum.Sum(nil)); n != ref.Size || found != ref.StoredSHA256 {
		return finding.Finding{
			Object:   "artifact " + s.base + stored,
			Expected: fmt.Sprintf("%d bytes with SHA-256 %s", ref.Size, ref.StoredSHA256),
			Found:    fmt.Sprintf("%d bytes with %s", n, found),
			Next:     "check the store's disk or bucket; nothing may rest on this backup",
		}.Error(finding.Stop)
	}
	return nil
}

func (s *Store) readRef(ctx context.Context, stored string) (Ref, error) {
	var ref Ref
	data, err := s.bucket.ReadAll(ctx, stored+refSuffix)
	if err != nil {
		return ref, err
	}
	return ref, json.Unmarshal(data, &ref)
}

// Get writes an artifact's plaintext to w. identity is an age identity file,
// needed for secret artifacts only. Both digests are compared on the way: what
// w received is worth something only when the error is nil.
func (s *Store) Get(ctx context.Context, address string, identity io.Reader, w io.Writer) (Ref, error) {
	stored, err := s.key(address)
	if err != nil {
		return Ref{}, err
	}
	ref, err := s.readRef(ctx, stored)
	if err != nil {
		return Ref{}, s.wrap(err, "read", stored+refSuffix)
	}
	r, err := s.bucket.NewReader(ctx, stored, nil)
	if err != nil {
		return Ref{}, s.wrap(err, "read", stored)
	}
	defer r.Close()
	object := sha256.New()
	raw := io.TeeReader(r, object)
	source := raw
	if ref.Kind == Secret {
		if identity == nil {
			return Ref{}, fmt.Errorf("artifact %s is encrypted: give the age identity file of one of its recipients", address)
		}
		identities, err := age.ParseIdentities(identity)
		if err != nil {
			return Ref{}, fmt.Errorf("age identity: %w", err)
		}
		if source, err = age.Decrypt(raw, identities...); err != nil {
			return Ref{}, fmt.Errorf("artifact %s: %w", address, err)
		}
	}
	plain := sha256.New()
	if _, err := io.Copy(io.MultiWriter(w, plain), source); err != nil {
		return Ref{}, s.wrap(err, "read", stored)
	}
	if _, err := io.Copy(io.Discard, raw); err != nil {
		return Ref{}, s.wrap(err, "read", stored)
	}
	for _, digest := range []struct{ of, want, found string }{
		{"object", ref.StoredSHA256, hex.EncodeToString(object.Sum(nil))},
		{"plaintext", ref.PlainSHA256, hex.EncodeToString(plain.Sum(nil))},
	} {
		if digest.want != digest.found {
			return Ref{}, fmt.Errorf("artifact %s: expected SHA-256 %s of the %s, found %s: it was changed in the store", address, digest.want, digest.of, digest.found)
		}
	}
	return ref, nil
}

// key is the object's key of a URL given out by Put, or of a name: the latter
// may leave out the suffix of encrypted objects only as part of a URL.
func (s *Store) key(address string) (string, error) {
	if !strings.Contains(address, "://") {
		return address, nil
	}
	key, ok := strings.CutPrefix(address, s.base)
	if !ok || key == "" {
		return "", fmt.Errorf("artifact %s: expected a URL under %s", address, s.base)
	}
	return key, nil
}

// List returns the artifacts whose name begins with prefix, by name.
func (s *Store) List(ctx context.Context, prefix string) ([]Ref, error) {
	var refs []Ref
	entries := s.bucket.List(&blob.ListOptions{Prefix: strings.TrimPrefix(prefix, "/")})
	for {
		entry, err := entries.Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, s.wrap(err, "list", prefix)
		}
		stored, ok := strings.CutSuffix(entry.Key, refSuffix)
		if !ok {
			continue
		}
		ref, err := s.readRef(ctx, stored)
		if err != nil {
			return nil, s.wrap(err, "read", entry.Key)
		}
		refs = append(refs, ref)
	}
	sort.Slice(refs, func(i, j int) bool { return refs[i].Name < refs[j].Name })
	return refs, nil
}

// wrap gives a store's error its class: what is missing or forbidden needs a
// person, the rest passes.
func (s *Store) wrap(err error, act, key string) error {
	if _, _, ok := finding.Of(err); ok || errors.Is(err, context.Canceled) {
		return err
	}
	class := finding.Retry
	switch gcerrors.Code(err) {
	case gcerrors.NotFound, gcerrors.PermissionDenied, gcerrors.InvalidArgument, gcerrors.Unimplemented:
		class = finding.Stop
	}
	return finding.Finding{Object: act + " artifact " + s.base + key, Found: err.Error()}.Error(class)
}

// counter hashes and counts what passes.
type counter struct {
	w    io.Writer
	hash hash.Hash
	n    int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.hash.Write(p[:n])
	c.n += int64(n)
	return n, err
}

func (c *counter) sum() string { return hex.EncodeToString(c.hash.Sum(nil)) }
