package gpuagent

import (
	"debug/elf"
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const top = "../.."

// instructions are those of the Dockerfile, by name, and the command in its head
// that builds it. No daemon is to be expected where tests run.
func instructions(t *testing.T) (by map[string][]string, build string) {
	t.Helper()
	text, err := os.ReadFile("Dockerfile")
	require.NoError(t, err)
	build = regexp.MustCompile(`(?m)^#   (docker build .*)$`).FindStringSubmatch(string(text))[1]
	by = map[string][]string{}
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, _ := strings.Cut(line, " ")
		require.Contains(t, []string{"FROM", "RUN", "COPY", "ENTRYPOINT"}, name, line)
		by[name] = append(by[name], rest)
	}
	return by, build
}

// The bundle is built beforehand: what the image copies is what `make
// gpu-bundle` writes, from the folder that is the build's context.
func TestTheImageHoldsTheBinaryOfTheBundle(t *testing.T) {
	by, build := instructions(t)
	words := strings.Fields(build)
	context := words[len(words)-1]
	bundle, err := os.ReadFile(filepath.Join(top, "tools", "gpu-bundle.sh"))
	require.NoError(t, err)
	require.Contains(t, string(bundle), "dir=${1:-"+context+"} ")
	require.Contains(t, words, "deploy/gpuagent/Dockerfile")
	require.FileExists(t, filepath.Join(top, "deploy/gpuagent/Dockerfile"))

	require.Len(t, by["COPY"], 1)
	from, to, _ := strings.Cut(by["COPY"][0], " ")
	built := regexp.MustCompile(`-o "\$dir/(\S+)" (\S+)`).FindAllStringSubmatch(string(bundle), -1)
	require.Equal(t, []string{from, "./gpuagent/cmd/refit-gpuagent"}, built[0][1:])
	var entry []string
	require.NoError(t, json.Unmarshal([]byte(by["ENTRYPOINT"][0]), &entry))
	require.Equal(t, []string{to}, entry, "the manifest's args follow it")
	require.Equal(t, from, path.Base(to))
}

func TestTheManifestRunsTheImageThatIsBuilt(t *testing.T) {
	_, build := instructions(t)
	sets, _ := load(t)
	tag := regexp.MustCompile(` -t (\S+) `).FindStringSubmatch(build)[1]
	for level, d := range sets {
		require.Equal(t, tag, agent(d).Image, level)
	}
}

// glibc of the base by its Debian version.
var glibc = map[string]int{"12": 36, "13": 41}

func TestTheBaseIsPinnedAndNotOlderThanTheBinaryNeeds(t *testing.T) {
	by, _ := instructions(t)
	require.Len(t, by["FROM"], 1)
	base := regexp.MustCompile(`^debian:(\d+)\.\d+-slim$`).FindStringSubmatch(by["FROM"][0])
	require.NotNil(t, base, by["FROM"][0])
	// Built here, as the bundle is, so that the compiler and glibc are this host's.
	if _, err := exec.LookPath("gcc"); err != nil && os.Getenv("CI") == "" {
		t.Skip("no C compiler: install gcc and the C library's headers")
	}
	binary := filepath.Join(t.TempDir(), "refit-gpuagent")
	build := exec.Command("go", "build", "-trimpath", "-o", binary, "../../gpuagent/cmd/refit-gpuagent")
	build.Env = append(os.Environ(), "CGO_ENABLED=1", "CGO_CFLAGS=-O1 -g -Wno-deprecated-declarations")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	f, err := elf.Open(binary)
	require.NoError(t, err)
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	require.NoError(t, err)
	needs := 0
	for _, s := range symbols {
		if minor, is := strings.CutPrefix(s.Version, "GLIBC_2."); is {
			n, _ := strconv.Atoi(strings.SplitN(minor, ".", 2)[0])
			needs = max(needs, n)
		}
	}
	require.Positive(t, needs, "it is linked with glibc")
	if needs > glibc[base[1]] && os.Getenv("CI") == "" {
		t.Skipf("this host's binary needs glibc 2.%d: the bundle for the image is built on one like the base", needs)
	}
	require.LessOrEqual(t, needs, glibc[base[1]])
}
