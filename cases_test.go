package lapse_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// kinds are the known faults of systems like this one, as users reported them: how many of each kind are numbered.
var kinds = map[string]int{"PAY": 7, "STK": 5, "MQ": 21, "PRD": 9, "DB": 17, "JOB": 10, "CFG": 6, "DEP": 3}

var (
	inTest = regexp.MustCompile(`// (?:.*\b)?[Cc]ases?:? ((?:[A-Z]{2,3}-[0-9]+(?:, | and )?)+)`)
	inDoc  = regexp.MustCompile(`(?m)^\| ([A-Z]{2,3}-[0-9]+) \|`)
	caseID = regexp.MustCompile(`[A-Z]{2,3}-[0-9]+`)
)

// A fault that somebody met elsewhere is either ruled out by a test that names it, or docs/cases.md says why there is none.
func TestEveryKnownFaultHasATestOrAReason(t *testing.T) {
	t.Parallel()
	tested := map[string][]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, "_test.go") || path == "cases_test.go" {
			return nil
		}
		source, err := os.ReadFile(path) //nolint:gosec // paths of this repository
		if err != nil {
			return err
		}
		for _, m := range inTest.FindAllStringSubmatch(string(source), -1) {
			for _, id := range caseID.FindAllString(m[1], -1) {
				tested[id] = append(tested[id], path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("docs/cases.md")
	if err != nil {
		t.Fatal(err)
	}
	var excused []string
	for _, m := range inDoc.FindAllStringSubmatch(string(doc), -1) {
		if slices.Contains(excused, m[1]) {
			t.Errorf("docs/cases.md lists %s twice", m[1])
		}
		excused = append(excused, m[1])
	}
	known := map[string]bool{}
	for kind, n := range kinds {
		for i := 1; i <= n; i++ {
			id := fmt.Sprintf("%s-%d", kind, i)
			known[id] = true
			if len(tested[id]) == 0 && !slices.Contains(excused, id) {
				t.Errorf("%s has no test that names it, and no row in docs/cases.md", id)
			}
		}
	}
	for id, paths := range tested {
		if !known[id] {
			t.Errorf("%v name %s, which is no known case", paths, id)
		}
	}
	for _, id := range excused {
		if !known[id] {
			t.Errorf("docs/cases.md lists %s, which is no known case", id)
		}
	}
}
