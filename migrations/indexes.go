package migrations

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
)

// The forms in which the migrations make and drop indexes. A test compares what is found with what the database then has.
var (
	tableOf   = regexp.MustCompile(`(?i)\b(CREATE|ALTER|DROP) TABLE (\w+)`)
	indexMade = regexp.MustCompile(`(?im)^\s*(?:ADD )?((?:PRIMARY KEY|(?:UNIQUE )?KEY (\w+)) \([^)]*\))`)
	indexGone = regexp.MustCompile(`(?i)\bDROP (?:KEY|INDEX) (\w+)`)
)

// Index is an index as the migrations make it.
type Index struct {
	Name       string // PRIMARY for the primary key
	Definition string // what makes it, behind ALTER TABLE … ADD
}

// Indexes gives the tables that the migrations of this build make, and the indexes of each. Statements of ours name their index, so with
// one missing they fail.
func Indexes() (map[string][]Index, error) {
	names, err := fs.Glob(files, "sql/*.sql") // sorted
	if err != nil {
		return nil, fmt.Errorf("read embedded migrations: %w", err)
	}
	tables := map[string][]Index{}
	for _, name := range names {
		text, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read embedded migrations: %w", err)
		}
		up, _, _ := strings.Cut(string(text), "-- +goose Down")
		verb := tableOf.FindStringSubmatch(up)
		if verb == nil {
			continue // rows, not tables
		}
		table := verb[2]
		if strings.EqualFold(verb[1], "DROP") {
			delete(tables, table)
			continue
		}
		for _, m := range indexGone.FindAllStringSubmatch(up, -1) {
			tables[table] = slices.DeleteFunc(tables[table], func(index Index) bool { return index.Name == m[1] })
		}
		for _, m := range indexMade.FindAllStringSubmatch(up, -1) {
			index := m[2]
			if index == "" {
				index = "PRIMARY"
			}
			tables[table] = append(tables[table], Index{Name: index, Definition: m[1]})
		}
	}
	return tables, nil
}
