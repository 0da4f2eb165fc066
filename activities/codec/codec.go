// Package codec encrypts what Refit's processes hand to Temporal: inputs,
// results, heartbeats, summaries, queries and the text of failures. Every
// process of an installation (worker, command line, node agents) is given the
// same key file. It must not know what it encrypts. Search attributes, workflow
// ids and activity names stay readable: Temporal needs them.
package codec

import (
	"bufio"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"

	commonpb "go.temporal.io/api/common/v1"
	"go.temporal.io/sdk/client"
	"go.temporal.io/sdk/converter"
	"go.temporal.io/sdk/temporal"
	"google.golang.org/protobuf/proto"
)

// Variable names the key file in the environment; without it nothing is
// encrypted.
const Variable = "REFIT_PAYLOAD_KEYS"

// Metadata of an encrypted payload.
const (
	encoding      = "binary/encrypted"
	encodingField = converter.MetadataEncoding
	keyField      = "encryption-key-id"
)

// keySize is AES-256's, in bytes.
const keySize = 32

// Keys encrypt with the first key and decrypt with any of them, so that keys
// can be rotated while histories of older ones live.
type Keys struct {
	first string
	aeads map[string]cipher.AEAD
}

var _ converter.PayloadCodec = (*Keys)(nil)

// New is a line for a key file: a name and a fresh key.
func New(name string) (string, error) {
	if name == "" || strings.ContainsAny(name, " \t\n#") {
		return "", fmt.Errorf("key name %q: expected a word without spaces or #, such as the month it is made in", name)
	}
	key := make([]byte, keySize)
	if _, err := rand.Read(key); err != nil {
		return "", fmt.Errorf("make a payload key: %w", err)
	}
	return name + " " + base64.StdEncoding.EncodeToString(key), nil
}

// FromEnv reads the key file that the environment names; nil when it names
// none.
func FromEnv(getenv func(string) string) (*Keys, error) {
	path := getenv(Variable)
	if path == "" {
		return nil, nil
	}
	k, err := Read(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Variable, err)
	}
	return k, nil
}

// Read reads a key file: one key a line, its name and its base64 form; the
// first one encrypts. Empty lines and those that begin with # say nothing.
func Read(path string) (*Keys, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("payload keys: %w", err)
	}
	defer file.Close()
	k := &Keys{aeads: map[string]cipher.AEAD{}}
	lines := bufio.NewScanner(file)
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := k.add(line); err != nil {
			return nil, fmt.Errorf("payload keys, %s line %d: %w", path, number, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("payload keys: %w", err)
	}
	if k.first == "" {
		return nil, fmt.Errorf("payload keys: %s holds no key; `refit codec key NAME` makes one", path)
	}
	return k, nil
}

// add never quotes the line: it holds a key.
func (k *Keys) add(line string) error {
	name, text, _ := strings.Cut(line, " ")
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil || len(key) != keySize {
		return fmt.Errorf("expected a name and %d bytes in base64, found something else; `refit codec key NAME` makes such a line", keySize)
	}
	if k.aeads[name] != nil {
		return fmt.Errorf("key %s stands twice", name)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	if k.aeads[name], err = cipher.NewGCMWithRandomNonce(block); err != nil {
		return err
	}
	if k.first == "" {
		k.first = name
	}
	return nil
}

// Apply makes a client encrypt and decrypt. Without keys the client writes in
// the clear, and says what is missing when it meets something encrypted; a
// converter that it has already stays then.
func (k *Keys) Apply(o *client.Options) {
	if k == nil && o.DataConverter != nil {
		return
	}
	o.DataConverter = converter.NewCodecDataConverter(converter.GetDefaultDataConverter(), k)
	o.FailureConverter = temporal.NewDefaultFailureConverter(temporal.DefaultFailureConverterOptions{
		DataConverter: o.DataConverter, EncodeCommonAttributes: k != nil,
	})
}

// Encode encrypts each payload, its metadata included.
func (k *Keys) Encode(payloads []*commonpb.Payload) ([]*commonpb.Payload, error) {
	if k == nil {
		return payloads, nil
	}
	out := make([]*commonpb.Payload, len(payloads))
	for i, p := range payloads {
		plain, err := proto.Marshal(p)
		if err != nil {
			return nil, fmt.Errorf("encrypt a payload: %w", err)
		}
		out[i] = &commonpb.Payload{
			Metadata: map[string][]byte{encodingField: []byte(encoding), keyField: []byte(k.first)},
			Data:     k.aeads[k.first].Seal(nil, nil, plain, []byte(k.first)),
		}
	}
	return out, nil
}

// Decode decrypts what Encode encrypted and leaves everything else as it is:
// answers typed with another tool come in the clear.
func (k *Keys) Decode(payloads []*commonpb.Payload) ([]*commonpb.Payload, error) {
	out := make([]*commonpb.Payload, len(payloads))
	for i, p := range payloads {
		if string(p.GetMetadata()[encodingField]) != encoding {
			out[i] = p
			continue
		}
		name := string(p.GetMetadata()[keyField])
		if k == nil {
			return nil, fmt.Errorf("payload encrypted with key %q: this process has no keys; name the installation's key file in %s", name, Variable)
		}
		aead := k.aeads[name]
		if aead == nil {
			return nil, fmt.Errorf("payload encrypted with key %q: expected one of the key file's, found none of that name; add the key to the file named by %s", name, Variable)
		}
		plain, err := aead.Open(nil, nil, p.GetData(), []byte(name))
		if err != nil {
			return nil, errors.New("payload encrypted with key " + name + ": it does not open with the key of that name; another installation may have made it")
		}
		out[i] = &commonpb.Payload{}
		if err := proto.Unmarshal(plain, out[i]); err != nil {
			return nil, fmt.Errorf("payload encrypted with key %s: %w", name, err)
		}
	}
	return out, nil
}
