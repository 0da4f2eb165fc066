// Package charts holds the sandbox's double of the tensor-fusion Helm chart in
// two versions. It behaves like the real chart where that hurts: a rolling
// update policy that is no value, CRDs that Helm never upgrades, a Secret that
// is rendered only once, a plain token in a Deployment, hooks and a floating
// tag. It must not hold anything the product could import as its own truth.
package charts

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"sort"
	"strings"
)

// Name is the chart's name; archives hold one folder of that name.
const Name = "tensor-fusion"

// common holds what the versions share; a version's folder overrides it.
//
//go:embed all:tensor-fusion
var embedded embed.FS

// Versions lists the chart versions, oldest first.
func Versions() []string { return []string{"1.8.6", "1.8.7"} }

// files merges common and the version's own files, by path inside the chart.
func files(version string) (map[string][]byte, error) {
	if !slices.Contains(Versions(), version) {
		return nil, fmt.Errorf("sandbox chart %s: version %q not found; there are %s", Name, version, strings.Join(Versions(), ", "))
	}
	merged := map[string][]byte{}
	for _, layer := range []string{"common", version} {
		root := path.Join(Name, layer)
		err := fs.WalkDir(embedded, root, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := embedded.ReadFile(p)
			if err != nil {
				return err
			}
			merged[strings.TrimPrefix(p, root+"/")] = data
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("sandbox chart %s %s: %w", Name, version, err)
		}
	}
	return merged, nil
}

func paths(merged map[string][]byte) []string {
	names := make([]string, 0, len(merged))
	for name := range merged {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// FS is the chart folder (Chart.yaml at its top) of one version; os.CopyFS
// writes it to disk.
func FS(version string) (fs.FS, error) {
	merged, err := files(version)
	if err != nil {
		return nil, err
	}
	// A zip archive in memory is a complete read-only fs.FS.
	var buffer bytes.Buffer
	archive := zip.NewWriter(&buffer)
	for _, name := range paths(merged) {
		w, err := archive.Create(name)
		if err == nil {
			_, err = w.Write(merged[name])
		}
		if err != nil {
			return nil, fmt.Errorf("sandbox chart %s %s: %s: %w", Name, version, name, err)
		}
	}
	if err := archive.Close(); err != nil {
		return nil, fmt.Errorf("sandbox chart %s %s: %w", Name, version, err)
	}
	return zip.NewReader(bytes.NewReader(buffer.Bytes()), int64(buffer.Len()))
}

// Archive is the chart as a .tgz. The same version gives the same bytes, so
// that its digest can be pinned.
func Archive(version string) ([]byte, error) {
	merged, err := files(version)
	if err != nil {
		return nil, err
	}
	var buffer bytes.Buffer
	zipped := gzip.NewWriter(&buffer)
	archive := tar.NewWriter(zipped)
	for _, name := range paths(merged) {
		header := &tar.Header{Name: path.Join(Name, name), Mode: 0o644, Size: int64(len(merged[name])), Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("sandbox chart %s %s: %s: %w", Name, version, name, err)
		}
		if _, err := archive.Write(merged[name]); err != nil {
			return nil, fmt.Errorf("sandbox chart %s %s: %s: %w", Name, version, name, err)
		}
	}
	if err := archive.Close(); err != nil {
		return nil, fmt.Errorf("sandbox chart %s %s: %w", Name, version, err)
	}
	if err := zipped.Close(); err != nil {
		return nil, fmt.Errorf("sandbox chart %s %s: %w", Name, version, err)
	}
	return buffer.Bytes(), nil
}
