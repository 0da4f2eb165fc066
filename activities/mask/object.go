package mask

import (
	"regexp"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// FromObjects knows what Kubernetes objects say in the open under a known
// secret key: fields, keys of a ConfigMap, annotations, variables of a
// container (name and value), arguments (--password=...), and the same in
// documents that a text holds; also the passwords of URLs. Secrets are not
// looked into: everything in them is secret.
func FromObjects(objects ...map[string]any) *Masker {
	m := New()
	for _, object := range objects {
		if object["kind"] != "CustomResourceDefinition" { // its keys name fields, not values
			m.learn(object)
		}
	}
	return m
}

func (m *Masker) learn(node any) {
	texts(node, "", func(key, text string) {
		if SecretKey(key) {
			m.addTold(text)
			return
		}
		if name, value, ok := strings.Cut(text, "="); ok && !strings.ContainsAny(name, " \n") && SecretKey(strings.TrimLeft(name, "-")) {
			m.addTold(value)
		}
		for _, found := range userInfo.FindAllStringSubmatch(text, -1) {
			m.addTold(found[1])
		}
		if strings.ContainsAny(text, "\n{") {
			var document map[string]any
			if yaml.Unmarshal([]byte(text), &document) == nil {
				m.learn(document)
			}
		}
	})
}

// userInfo finds the password in scheme://user:password@host.
var userInfo = regexp.MustCompile(`[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@`)

// addTold adds a value that stands under a secret key, unless it is a word that
// says what stands elsewhere: masking it would hide nothing.
func (m *Masker) addTold(value string) {
	if _, err := strconv.ParseBool(value); err == nil {
		return
	}
	for _, known := range KnownSecretKeys {
		if fold(value) == fold(known) {
			return
		}
	}
	m.Add(value)
}

// texts visits every text with its key; the items of a list have the list's.
func texts(node any, key string, visit func(key, text string)) {
	switch n := node.(type) {
	case map[string]any:
		for k, value := range n {
			texts(value, told(n, k), visit)
		}
	case []any:
		for _, value := range n {
			if _, ok := value.(string); ok {
				texts(value, key, visit)
			} else {
				texts(value, "", visit)
			}
		}
	case string:
		visit(key, n)
	}
}

// told is the key that says what a value is: of a pair of name and value, as a
// container's variables are written, it is the name.
func told(n map[string]any, key string) string {
	if name, ok := n["name"].(string); ok && key == "value" {
		return name
	}
	return key
}
