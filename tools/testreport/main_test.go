package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// helper is the part of a throwaway package that counts how often each of its
// tests ran, in files beside it.
const helper = `package NAME

import (
	"os"
	"testing"
)

var _ testing.TB // a package may have no test that needs it

// run counts the run of a test and returns which one it is.
func run(name string) int {
	file, err := os.OpenFile(name+".runs", os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		panic(err)
	}
	if _, err := file.WriteString("x"); err != nil {
		panic(err)
	}
	info, err := file.Stat()
	if err != nil {
		panic(err)
	}
	return int(info.Size())
}
`

// module writes a throwaway module with a package per entry and returns the
// command that tests it.
func module(t *testing.T, packages map[string]string) (command, string) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module throwaway\n\ngo 1.24\n"), 0o600))
	for name, tests := range packages {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		for file, text := range map[string]string{"helper_test.go": strings.ReplaceAll(helper, "NAME", name), "a_test.go": "package " + name + "\n" + tests} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name, file), []byte(text), 0o600))
		}
	}
	t.Setenv("GOWORK", "off")
	return command{strict: true, again: true, words: []string{"go", "-C", dir, "test", "-trimpath"}, packages: []string{"./..."}}, dir
}

// runs maps "package/test" to how often it ran.
func runs(t *testing.T, dir string) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", "*.runs"))
	require.NoError(t, err)
	out := map[string]int{}
	for _, f := range files {
		info, err := os.Stat(f)
		require.NoError(t, err)
		name, err := filepath.Rel(dir, strings.TrimSuffix(f, ".runs"))
		require.NoError(t, err)
		out[name] = int(info.Size())
	}
	return out
}

const (
	passing = `
import "testing"

func TestSound(t *testing.T)  { run("sound") }
func TestShared(t *testing.T) { run("shared") }
`
	once = `
import "testing"

func TestSound(t *testing.T) { run("sound") }
func TestShared(t *testing.T) {
	t.Run("a case", func(t *testing.T) {
		if run("shared") == 1 {
			t.Error("the port is taken")
		}
	})
}
`
)

func TestWhatFailedIsRunOnceMore(t *testing.T) {
	for _, c := range []struct {
		name     string
		packages map[string]string
		ok       bool
		runs     map[string]int
		says     []string
	}{
		{
			"a test that fails once is unstable, and it alone is run again", map[string]string{"flaky": once, "sound": passing}, true,
			map[string]int{"flaky/sound": 1, "flaky/shared": 2, "sound/sound": 1, "sound/shared": 1},
			[]string{"the port is taken", "RUNNING AGAIN ONCE: throwaway/flaky TestShared\n", "UNSTABLE: throwaway/flaky TestShared failed once"},
		},
		{
			"a test that fails twice fails the run", map[string]string{"broken": strings.ReplaceAll(once, "== 1", "> 0")}, false,
			map[string]int{"broken/sound": 1, "broken/shared": 2}, []string{"FAILED TWICE: throwaway/broken TestShared\n"},
		},
		{
			"a test that is skipped at the second try has not passed", map[string]string{"shy": `
import "testing"

func TestShy(t *testing.T) {
	if run("shy") == 1 {
		t.Fatal("the first try")
	}
	t.Skip("optional: needs luck")
}
`}, false, map[string]int{"shy/shy": 2}, []string{"FAILED TWICE: throwaway/shy TestShy\n"},
		},
		{
			"a package that panics is run again as a whole", map[string]string{"panics": `
import "testing"

func TestBefore(t *testing.T) { run("before") }
func TestPanics(t *testing.T) {
	if run("panics") == 1 {
		panic("out of luck")
	}
}
func TestAfter(t *testing.T) { run("after") }
`}, true, map[string]int{"panics/before": 2, "panics/panics": 2, "panics/after": 1},
			[]string{"panic: out of luck", "UNSTABLE: throwaway/panics failed once"},
		},
		{
			"a test that ends the process hides no other", map[string]string{"exits": `
import (
	"os"
	"testing"
)

func TestExits(t *testing.T) {
	if run("exits") == 1 {
		os.Exit(1)
	}
}
func TestAfter(t *testing.T) {
	run("after")
	t.Error("seen at the second try")
}
`}, false, map[string]int{"exits/exits": 2, "exits/after": 1}, []string{"seen at the second try", "FAILED TWICE: throwaway/exits\n"},
		},
		{
			"a package that fails outside of its tests is run again as a whole", map[string]string{"main": `
import (
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if run("main") == 1 {
		fmt.Println("something was left behind")
		code = 1
	}
	os.Exit(code)
}
func TestSound(t *testing.T) { run("sound") }
`}, true, map[string]int{"main/main": 2, "main/sound": 2}, []string{"something was left behind", "UNSTABLE: throwaway/main failed once"},
		},
		{
			"what does not build is not tried twice", map[string]string{"flaky": once, "wrong": "import \"testing\"\n\nfunc TestWrong(t *testing.T) { undefined() }\n"}, false,
			map[string]int{"flaky/sound": 1, "flaky/shared": 1}, []string{"undefined: undefined", "NOT RUN AGAIN: throwaway/wrong does not build\n"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd, dir := module(t, c.packages)
			var out strings.Builder
			ok, err := cmd.run(t.Context(), &out)
			require.NoError(t, err, out.String())
			assert.Equal(t, c.ok, ok, out.String())
			assert.Equal(t, c.runs, runs(t, dir), out.String())
			for _, s := range c.says {
				assert.Contains(t, out.String(), s)
			}
			if !c.ok {
				assert.NotContains(t, out.String(), "UNSTABLE")
			}
		})
	}
}

func TestWithoutAgainAFailureIsAFailureAtOnce(t *testing.T) {
	cmd, dir := module(t, map[string]string{"flaky": once})
	cmd.again = false
	var out strings.Builder
	ok, err := cmd.run(t.Context(), &out)
	require.NoError(t, err)
	assert.False(t, ok)
	assert.Equal(t, map[string]int{"flaky/sound": 1, "flaky/shared": 1}, runs(t, dir))
	assert.NotContains(t, out.String(), "AGAIN")
}

func TestACommandThatCanNotStartFails(t *testing.T) {
	cmd, _ := module(t, map[string]string{"sound": passing})
	cmd.words = append(cmd.words, "-timeout=never")
	var out strings.Builder
	ok, err := cmd.run(t.Context(), &out)
	require.NoError(t, err)
	assert.False(t, ok)
	assert.Contains(t, out.String(), "named no package that failed")
}

func TestACommandIsToldFromItsPackages(t *testing.T) {
	words, packages, err := split([]string{"go", "test", "-timeout", "40m", "--", "./a", "./b/..."})
	require.NoError(t, err)
	assert.Equal(t, []string{"go", "test", "-timeout", "40m"}, words)
	assert.Equal(t, []string{"./a", "./b/..."}, packages)
	for _, wrong := range [][]string{nil, {"go", "test", "./a"}, {"--", "./a"}, {"go", "test", "--"}} {
		_, _, err := split(wrong)
		assert.ErrorContains(t, err, "expected a command, -- and packages")
	}
}
