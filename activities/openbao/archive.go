package openbao

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Files of a Raft snapshot, in their order; the last one proves, to whoever
// holds the seal, that the checksums are the server's.
const (
	sumsFile   = "SHA256SUMS"
	sealedFile = "SHA256SUMS.sealed"
)

// archiveFiles must be there; an archive holds nothing else.
var archiveFiles = []string{"meta.json", "state.bin", sumsFile, sealedFile}

// errArchive marks a snapshot that came and is not whole.
var errArchive = errors.New("the snapshot is not whole")

// checkArchive reads a snapshot to its very end and proves it: the gzip stream
// is complete, every file is there once, each has the checksum that is listed
// for it, and SHA256SUMS.sealed, which the server writes last, is there and
// not empty. A stream that breaks off is noticed even between two files.
func checkArchive(r io.Reader) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{errArchive}, args...)...)
	}
	plain, err := gzip.NewReader(r)
	if err != nil {
		return bad("no gzip stream: %w", err)
	}
	var sums map[string]string
	found, last := map[string]string{}, ""
	for files := tar.NewReader(plain); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return bad("after file %q: %w", last, err)
		}
		name := header.Name
		if !slices.Contains(archiveFiles, name) {
			return bad("an unknown file %q", name)
		}
		if _, twice := found[name]; twice {
			return bad("file %s twice", name)
		}
		sum := sha256.New()
		var content io.Reader = io.TeeReader(files, sum)
		if name == sumsFile {
			if sums, err = readSums(content); err != nil {
				return bad("%w", err)
			}
		} else if n, err := io.Copy(io.Discard, content); err != nil {
			return bad("file %s breaks off: %w", name, err)
		} else if n == 0 {
			return bad("file %s is empty", name)
		}
		found[name], last = hex.EncodeToString(sum.Sum(nil)), name
	}
	// The padding after the archive, and with it the end and the checksum of
	// the gzip stream.
	if _, err := io.Copy(io.Discard, plain); err != nil {
		return bad("its end is missing: %w", err)
	}
	for _, name := range archiveFiles {
		if _, ok := found[name]; !ok {
			return bad("file %s is missing", name)
		}
	}
	if last != sealedFile {
		return bad("it ends in %s, not in %s", last, sealedFile)
	}
	for _, name := range archiveFiles[:2] {
		if _, listed := sums[name]; !listed {
			return bad("%s does not list %s", sumsFile, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		switch got, ok := found[name]; {
		case !ok:
			return bad("%s lists %s, which is not there", sumsFile, name)
		case got != sums[name]:
			return bad("file %s has the checksum %s, and %s lists %s", name, got, sumsFile, sums[name])
		}
	}
	return nil
}

func readSums(r io.Reader) (map[string]string, error) {
	sums := map[string]string{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		sum, name, ok := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		if !ok {
			return nil, fmt.Errorf("%s has a line that is no checksum", sumsFile)
		}
		sums[strings.TrimLeft(name, " *")] = sum
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("file %s breaks off: %w", sumsFile, err)
	}
	return sums, nil
}
