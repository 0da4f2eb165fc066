package tensorfusion

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/json"
)

// fleet is a list of 8,000 GPUs as an API server sends it, managed fields and
// all.
func fleet() []byte {
	const gpu = `{"apiVersion":"tensor-fusion.ai/v1","kind":"GPU","metadata":{"name":"gpu-%[1]d","uid":"%[1]d","resourceVersion":"%[1]d",` +
		`"creationTimestamp":"2026-11-30T10:00:00Z","labels":{"tensor-fusion.ai/managed-by":"node-%[2]d"},"managedFields":[{"manager":"controller",` +
		`"operation":"Update","apiVersion":"tensor-fusion.ai/v1","time":"2026-11-30T10:00:00Z","fieldsType":"FieldsV1","fieldsV1":{"f:status":{".":{},` +
		`"f:available":{".":{},"f:tflops":{},"f:vram":{}},"f:capacity":{".":{},"f:tflops":{},"f:vram":{}},"f:gpuModel":{},"f:nodeSelector":{".":{},` +
		`"f:kubernetes.io/hostname":{}},"f:phase":{},"f:uuid":{}}},"subresource":"status"}]},"status":{"phase":"Running","gpuModel":"H100_SXM",` +
		`"capacity":{"tflops":"989","vram":"80Gi"},"available":{"tflops":"989","vram":"80Gi"},"nodeSelector":{"kubernetes.io/hostname":"node-%[2]d"},"uuid":"GPU-%[1]d"}}`
	items := make([]string, 8000)
	for i := range items {
		items[i] = fmt.Sprintf(gpu, i, i/8)
	}
	return []byte(`{"apiVersion":"tensor-fusion.ai/v1","kind":"GPUList","metadata":{},"items":[` + strings.Join(items, ",") + `]}`)
}

// BenchmarkDecodingAFleet compares the way of list with the one over maps.
func BenchmarkDecodingAFleet(b *testing.B) {
	answer := fleet()
	b.Run("typed", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var page struct {
				Items []FusionGPU `json:"items"`
			}
			require.NoError(b, json.Unmarshal(answer, &page))
		}
	})
	b.Run("maps", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			o, _, err := unstructured.UnstructuredJSONScheme.Decode(answer, nil, nil)
			require.NoError(b, err)
			for _, u := range o.(*unstructured.UnstructuredList).Items {
				_, err := decode[FusionGPU](&u)
				require.NoError(b, err)
			}
		}
	})
}
