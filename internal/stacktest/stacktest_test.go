package stacktest

import (
	"database/sql"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	_ "github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
)

func TestTopicAndGroupEndWithTheirTest(t *testing.T) {
	t.Parallel()
	broker := Shared(t)
	var topic, group string
	t.Run("Inner", func(t *testing.T) {
		topic, group = broker.NewTopic(t, admin.Normal), broker.NewGroup(t, 1)
		if _, err := broker.Admin.Offsets(t.Context(), group, topic); err != nil {
			t.Fatal(err)
		}
	})
	if _, err := broker.Admin.Topic(t.Context(), topic); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("topic %s after its test: %v, want ErrNotFound", topic, err)
	}
	if _, err := broker.Admin.Group(t.Context(), group); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("group %s after its test: %v, want ErrNotFound", group, err)
	}
}

// The rule that keeps a green `make test` from meaning "skipped", seen from outside: the test binary runs itself.
func TestMissingStackSkipsUnlessItIsRequired(t *testing.T) {
	t.Parallel()
	if os.Getenv("STACKTEST_CHILD") == "1" {
		Shared(t)
		return
	}
	for required, want := range map[string]string{"": "--- SKIP", "1": "--- FAIL"} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run", "^"+t.Name()+"$") //nolint:gosec // this test binary
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "LAPSE_") }),
			"STACKTEST_CHILD=1", "LAPSE_TEST_REQUIRE_STACK="+required)
		out, err := cmd.CombinedOutput()
		if !strings.Contains(string(out), want) || !strings.Contains(string(out), "scripts/stack up") || (err != nil) != (required == "1") {
			t.Errorf("LAPSE_TEST_REQUIRE_STACK=%q: %v, want %s and what to do:\n%s", required, err, want, out)
		}
	}
}

func TestPrivateMySQLKeepsItsDataThroughStopAndKill(t *testing.T) {
	t.Parallel()
	s := Private(t, Options{Parts: []Part{MySQL}})
	if s.Broker != nil || s.Endpoints() != "" {
		t.Error("a broker that was not asked for")
	}
	if len(s.Env()) == 0 || s.MySQLAdminDSN() == os.Getenv("LAPSE_TEST_MYSQL_ADMIN_DSN") {
		t.Errorf("environment %v, want the private stack's", s.Env())
	}
	db, err := sql.Open("mysql", s.MySQLAdminDSN())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // the server ends with the test
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE lapse.kept (n INT PRIMARY KEY)"); err != nil {
		t.Fatal(err)
	}
	for n, end := range []func(testing.TB, Part){s.Stop, s.Kill} {
		if _, err := db.ExecContext(t.Context(), "INSERT INTO lapse.kept VALUES (?)", n); err != nil {
			t.Fatal(err)
		}
		end(t, MySQL)
		if err := db.PingContext(t.Context()); err == nil {
			t.Fatal("MySQL answers though it was ended")
		}
		s.Start(t, MySQL)
		var rows int
		if err := db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM lapse.kept").Scan(&rows); err != nil {
			t.Fatal(err)
		}
		if rows != n+1 {
			t.Errorf("%d rows after end %d, want %d", rows, n, n+1)
		}
	}
}

// What a test process that was killed has left behind, a later one removes; what a living one uses, it does not touch.
func TestSweepRemovesOnlyWhatNobodyOwns(t *testing.T) {
	Require(t, "LAPSE_TEST_MYSQL_ADMIN_DSN")
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"orphan", "used", "unmarked"} {
		if err := os.Mkdir(filepath.Join(temp, statePrefix+name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(temp, statePrefix+"orphan", "owner"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	owner, err := lockOwner(filepath.Join(temp, statePrefix+"used"))
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close() //nolint:errcheck // a lock only
	if _, err := lockOwner(filepath.Join(temp, statePrefix+"used")); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Errorf("second owner: %v, want EWOULDBLOCK", err)
	}

	sweep(t, filepath.Join(root, "scripts", "stack"))

	entries, err := os.ReadDir(temp)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if want := []string{statePrefix + "unmarked", statePrefix + "used"}; !slices.Equal(left, want) {
		t.Errorf("left %v, want %v", left, want)
	}
}
