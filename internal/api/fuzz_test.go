package api

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// schemathesis names the fuzzer's program; `make api-fuzz` installs it and sets this.
const schemathesis = "LAPSE_TEST_SCHEMATHESIS"

// A fuzzer that knows the description sends what it allows and what it does not, in sequences, and finds no 5xx and no answer that is not as
// described. The orders that come of it keep the invariants.
func TestTheFuzzerFindsNoFault(t *testing.T) {
	program := os.Getenv(schemathesis)
	if program == "" {
		t.Skip(schemathesis + " is not set; make api-fuzz runs this test")
	}
	seconds := "60"
	if s := os.Getenv("LAPSE_TEST_FUZZ_SECONDS"); s != "" {
		seconds = s
	}
	b := setup(t, func(c *Config) { c.ReadTimeout = 2 * time.Second })
	if err := b.store.AdjustStock(t.Context(), orders.NewID(), "tea-100g", 1_000_000_000); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	description := filepath.Join(dir, "openapi.yaml")
	if err := os.WriteFile(description, OpenAPI, 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := filepath.Abs("testdata/schemathesis.toml")
	if err != nil {
		t.Fatal(err)
	}
	//nolint:gosec // whoever runs the test names the program
	cmd := exec.CommandContext(t.Context(), program, "--config-file", config, "run", description, "--url", b.http.URL,
		"--header", "Authorization: Bearer "+allToken, "--checks", "all", "--max-time", seconds, "--continue-on-failure",
		"--request-timeout", "10", "--warnings", "off", "--suppress-health-check", "all")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Errorf("the fuzzer has found something: %v", err)
	}
	placed := b.metric(t, "lapse_api_outcomes_total", "verb", "place", "outcome", "placed")
	for _, e := range b.server.endpoints() {
		n := b.metric(t, "lapse_api_requests_total", "route", e.path)
		t.Logf("%s: %v requests", e.path, n)
		if n == 0 || placed == 0 {
			t.Errorf("%v orders were placed and %s was asked %v times; the fuzzer has not got far enough", placed, e.path, n)
		}
	}
	// The consumer's work, which nothing does here.
	var overdue []string
	rows, err := b.db.SQL.QueryContext(t.Context(), "SELECT id FROM orders WHERE status = 'unpaid' AND deadline_at <= UTC_TIMESTAMP(3)")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close() //nolint:errcheck // it was read
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			t.Fatal(err)
		}
		overdue = append(overdue, id)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.store.CancelDue(t.Context(), overdue); err != nil {
		t.Fatal(err)
	}
	audit, err := orders.Audit(t.Context(), b.db.SQL, orders.AuditOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, check := range audit {
		if check.Violations != 0 {
			t.Errorf("%s %s is broken: %+v", check.Invariant, check.Name, check.Examples)
		}
	}
}
