package registry

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	helmregistry "helm.sh/helm/v3/pkg/registry"
	"helm.sh/helm/v3/pkg/repo"
	"sigs.k8s.io/yaml"

	"github.com/refit-run/refit/activities/finding"
)

const (
	// chartLimit is larger than any chart and smaller than a mistake.
	chartLimit = 64 << 20
	httpLimit  = 2 * time.Minute
)

// PullChart loads a chart and says what it is by digest, so that a later pull
// can prove that it is the same. ref is oci://host/repository, a chart
// repository's URL with the chart's name (https://host/path#name), or a folder
// or archive on this machine. The digest is the OCI manifest's, the archive's,
// or that of all files in the folder.
func (m Mirrors) PullChart(ctx context.Context, ref, version string) (*chart.Chart, string, error) {
	switch {
	case strings.HasPrefix(ref, "oci://"):
		return m.pullOCI(ctx, strings.TrimPrefix(ref, "oci://"), version)
	case strings.HasPrefix(ref, "http://"), strings.HasPrefix(ref, "https://"):
		return m.pullRepository(ctx, ref, version)
	}
	return loadLocal(ref, version)
}

func (m Mirrors) pullOCI(ctx context.Context, repository, version string) (*chart.Chart, string, error) {
	object := fmt.Sprintf("chart oci://%s version %s", repository, version)
	if _, tagged := splitTag(repository); !tagged {
		if version == "" {
			return nil, "", stop(object, "a version", "none", "name the chart's version: an OCI registry has no newest one")
		}
		// A tag can't hold '+', which SemVer uses for build metadata.
		repository += ":" + strings.ReplaceAll(version, "+", "_")
	}
	reference, err := m.reference(repository)
	if err != nil {
		return nil, "", stop(object, "a valid reference", err.Error(), "")
	}
	image, err := remote.Image(reference, m.options(ctx)...)
	if err != nil {
		return nil, "", wrap(err, object, reference.String())
	}
	digest, err := image.Digest()
	if err != nil {
		return nil, "", wrap(err, object, reference.String())
	}
	layers, err := image.Layers()
	if err != nil {
		return nil, "", wrap(err, object, reference.String())
	}
	for _, layer := range layers {
		media, err := layer.MediaType()
		if err != nil || (string(media) != helmregistry.ChartLayerMediaType && string(media) != helmregistry.LegacyChartLayerMediaType) {
			continue
		}
		data, err := layer.Compressed()
		if err != nil {
			return nil, "", wrap(err, object, reference.String())
		}
		defer data.Close()
		loaded, err := loadArchive(object, data)
		return loaded, digest.String(), err
	}
	return nil, "", stop(object, "a layer of type "+helmregistry.ChartLayerMediaType, "none", "the reference is no Helm chart")
}

func splitTag(repository string) (string, bool) {
	tag, pinned := Tag(repository)
	return tag, tag != "" || pinned
}

// pullRepository reads index.yaml and the archive that it names.
func (m Mirrors) pullRepository(ctx context.Context, ref, version string) (*chart.Chart, string, error) {
	base, chartName, ok := strings.Cut(ref, "#")
	object := fmt.Sprintf("chart %s version %s", ref, version)
	if !ok || chartName == "" {
		return nil, "", stop(object, "REPOSITORY-URL#NAME", "no chart name", "append #NAME to the repository's URL")
	}
	data, err := m.fetch(ctx, object, strings.TrimSuffix(base, "/")+"/index.yaml")
	if err != nil {
		return nil, "", err
	}
	index := repo.NewIndexFile()
	if err := yaml.Unmarshal(data, index); err != nil {
		return nil, "", stop(object, "a chart repository's index", err.Error(), "")
	}
	index.SortEntries()
	entry, err := index.Get(chartName, version)
	if err != nil || len(entry.URLs) == 0 {
		return nil, "", stop(object, "to be in "+base, "not in its index", "check name and version")
	}
	address, err := repo.ResolveReferenceURL(base, entry.URLs[0])
	if err != nil {
		return nil, "", stop(object, "a URL", err.Error(), "")
	}
	if strings.HasPrefix(address, "oci://") {
		return m.pullOCI(ctx, strings.TrimPrefix(address, "oci://"), entry.Version)
	}
	if data, err = m.fetch(ctx, object, address); err != nil {
		return nil, "", err
	}
	sum := digestOf(data)
	if entry.Digest != "" && strings.TrimPrefix(entry.Digest, "sha256:") != strings.TrimPrefix(sum, "sha256:") {
		return nil, "", stop(object, "SHA-256 "+entry.Digest+" as its index says", sum, "the archive was changed after it was published: do not use it")
	}
	loaded, err := loadArchive(object, bytes.NewReader(data))
	return loaded, sum, err
}

func (m Mirrors) fetch(ctx context.Context, object, address string) ([]byte, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, stop(object, "a URL", err.Error(), "")
	}
	if endpoint, ok := m.endpoints[u.Host]; ok {
		u.Scheme, u.Host, u.Path = endpoint.Scheme, endpoint.Host, strings.TrimSuffix(endpoint.Path, "/")+u.Path
	}
	ctx, cancel := context.WithTimeout(ctx, httpLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, stop(object, "a URL", err.Error(), "")
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, wrap(err, object, u.Redacted())
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		f := finding.Finding{Object: object, Expected: "200 OK from " + u.Redacted(), Found: response.Status,
			Next: "check the address and the worker's access to it"}
		if response.StatusCode >= 500 || response.StatusCode == http.StatusTooManyRequests {
			return nil, f.Error(finding.Retry)
		}
		return nil, f.Error(finding.Stop)
	}
	data, err := io.ReadAll(io.LimitReader(response.Body, chartLimit))
	if err != nil {
		return nil, wrap(err, object, u.Redacted())
	}
	return data, nil
}

func loadArchive(object string, r io.Reader) (*chart.Chart, error) {
	loaded, err := loader.LoadArchive(io.LimitReader(r, chartLimit))
	if err != nil {
		return nil, stop(object, "a chart archive", err.Error(), "")
	}
	return loaded, nil
}

func loadLocal(path, version string) (*chart.Chart, string, error) {
	object := "chart " + path
	info, err := os.Stat(path)
	if err != nil {
		return nil, "", stop(object, "a folder or archive on the worker", err.Error(), "the path is read on the worker, not where the plan was written")
	}
	var loaded *chart.Chart
	var sum string
	if info.IsDir() {
		if loaded, err = loader.LoadDir(path); err == nil {
			sum = digestOfFiles(loaded.Raw)
		}
	} else {
		var data []byte
		if data, err = os.ReadFile(path); err == nil {
			sum = digestOf(data)
			loaded, err = loader.LoadArchive(bytes.NewReader(data))
		}
	}
	if err != nil {
		return nil, "", stop(object, "a Helm chart", err.Error(), "")
	}
	if loaded.Metadata == nil {
		return nil, "", stop(object, "a Helm chart", "no Chart.yaml", "")
	}
	if version != "" && loaded.Metadata.Version != version {
		return nil, "", stop(object, "version "+version, "version "+loaded.Metadata.Version, "correct the plan's chart version or the path")
	}
	return loaded, sum, nil
}

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// digestOfFiles covers names, lengths and contents, in the order of names.
func digestOfFiles(files []*chart.File) string {
	sorted := append([]*chart.File(nil), files...)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].Name < sorted[j].Name })
	sum := sha256.New()
	for _, f := range sorted {
		fmt.Fprintf(sum, "%s\x00%d\x00", f.Name, len(f.Data))
		sum.Write(f.Data)
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil))
}

func stop(object, expected, found, next string) error {
	return finding.Finding{Object: object, Expected: expected, Found: found, Next: next}.Error(finding.Stop)
}
