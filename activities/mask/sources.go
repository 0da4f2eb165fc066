package mask

import (
	"fmt"
	"sort"
	"strings"
)

// KnownSecretKeys are the last parts of values paths whose value is a secret,
// compared without case, dashes and underscores, also as the end of a longer
// key (dbPassword).
var KnownSecretKeys = []string{
	"password", "passwd", "passphrase", "token", "enrollToken", "secretKey", "accessKey", "secretAccessKey",
	"accessKeyId", "apiKey", "privateKey", "clientSecret", "credentials", "licenseKey", "webhookUrl", "unsealKey",
}

// SecretKey reports whether a values key is known to hold a secret.
func SecretKey(key string) bool {
	return SecretKeyOf(key, KnownSecretKeys)
}

// SecretKeyOf is SecretKey for another list of keys.
func SecretKeyOf(key string, keys []string) bool {
	key = fold(key)
	for _, known := range keys {
		if strings.HasSuffix(key, fold(known)) {
			return true
		}
	}
	return false
}

func fold(key string) string {
	return strings.NewReplacer("-", "", "_", "", ".", "").Replace(strings.ToLower(key))
}

// FromSecret knows every value of Secrets' data (decoded) or stringData.
func FromSecret(data ...map[string][]byte) *Masker {
	m := New()
	for _, d := range data {
		for _, value := range d {
			m.Add(string(value))
		}
	}
	return m
}

// FromValues knows every scalar at or below a known secret key of Helm
// values. No keys means KnownSecretKeys.
func FromValues(values map[string]any, keys ...string) *Masker {
	if len(keys) == 0 {
		keys = KnownSecretKeys
	}
	m := New()
	walk(values, "", func(path, key string, value any) bool {
		if !SecretKeyOf(key, keys) {
			return true
		}
		eachScalar(value, func(text string) { m.Add(text) })
		return false
	})
	return m
}

// FromAll knows every scalar text of a document: for a secrets file, in which
// everything is secret.
func FromAll(values map[string]any) *Masker {
	m := New()
	eachScalar(values, func(text string) { m.Add(text) })
	return m
}

// RefuseInline lists the paths of inline values that hold a secret and must be
// references instead, sorted. Empty values and known placeholders of a chart
// ("", null, {}) are no secrets.
func RefuseInline(values map[string]any) []string {
	var paths []string
	walk(values, "", func(path, key string, value any) bool {
		if !SecretKey(key) {
			return true
		}
		filled := false
		eachScalar(value, func(text string) { filled = filled || text != "" })
		if filled {
			paths = append(paths, path)
		}
		return false
	})
	sort.Strings(paths)
	return paths
}

// walk visits every value with the key that tells what it is; visit says
// whether to go below it.
func walk(node any, path string, visit func(path, key string, value any) bool) {
	switch n := node.(type) {
	case map[string]any:
		for key, value := range n {
			at := key
			if path != "" {
				at = path + "." + key
			}
			if visit(at, told(n, key), value) {
				walk(value, at, visit)
			}
		}
	case []any:
		for i, value := range n {
			walk(value, fmt.Sprintf("%s[%d]", path, i), visit)
		}
	}
}

// eachScalar visits texts and numbers; a truth value is never a secret.
func eachScalar(node any, visit func(string)) {
	switch n := node.(type) {
	case map[string]any:
		for _, value := range n {
			eachScalar(value, visit)
		}
	case []any:
		for _, value := range n {
			eachScalar(value, visit)
		}
	case string:
		visit(n)
	case nil, bool:
	default:
		visit(fmt.Sprint(n))
	}
}
