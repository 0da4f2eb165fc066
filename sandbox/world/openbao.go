package world

import (
	"github.com/refit-run/refit/sandbox/openbao"
	"github.com/refit-run/refit/sandbox/procnode/datastore"
)

// BaoCommand is the sandbox's own program as OpenBao's double.
const BaoCommand = "bao"

// openbao is OpenBao of the double, or of the real servers where they are
// named.
func (w *World) openbao(self string) (datastore.Store, error) {
	tools, err := openbao.Tools(w.folder.Path("procnode", "tools", "openbao"), datastore.OpenBaoTags, self, BaoCommand)
	if err != nil {
		return datastore.Store{}, err
	}
	return datastore.OpenBao(tools), nil
}
