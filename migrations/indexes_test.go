package migrations_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/migrations"
)

// A migration that is written in a form which Indexes does not read shows here.
func TestIndexesAreThoseThatTheMigrationsMake(t *testing.T) {
	t.Parallel()
	db := mysqltest.New(t)
	rows, err := db.SQL.QueryContext(t.Context(), "SELECT DISTINCT TABLE_NAME, INDEX_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME <> ?", migrations.Table)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	want := map[string][]string{}
	for rows.Next() {
		var table, index string
		if err := rows.Scan(&table, &index); err != nil {
			t.Fatal(err)
		}
		want[table] = append(want[table], index)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	indexes, err := migrations.Indexes()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for table, list := range indexes {
		for _, index := range list {
			got[table] = append(got[table], index.Name)
		}
	}
	for _, table := range slices.Sorted(maps.Keys(want)) {
		slices.Sort(want[table])
		slices.Sort(got[table])
		if fmt.Sprint(got[table]) != fmt.Sprint(want[table]) {
			t.Errorf("%s has the indexes %v, Indexes gives %v", table, want[table], got[table])
		}
	}
	if len(got) != len(want) || len(got) < 10 {
		t.Errorf("%d tables have indexes, Indexes gives %d", len(want), len(got))
	}
	// What is said to make an index does.
	for _, index := range indexes["outbox"] {
		if index.Name == "outbox_to_do" {
			db.Exec(t, "ALTER TABLE outbox DROP KEY outbox_to_do")
			db.Exec(t, "ALTER TABLE outbox ADD "+index.Definition)
		}
	}
}
