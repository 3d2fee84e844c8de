package trial

import (
	"database/sql"
	"encoding/json"
	"errors"
	"math"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/stacktest"
)

func TestReconcileIsMeasuredWithItsReplicaFollowingAndStopped(t *testing.T) {
	t.Parallel()
	// Servers of its own: it stops the replica, which other tests read.
	stack := stacktest.Private(t, stacktest.Options{Parts: []stacktest.Part{stacktest.MySQL, stacktest.Replica}})
	binary, err := buildLapse()
	if err != nil {
		t.Fatal(err)
	}
	replica, err := sql.Open("mysql", stack.ReplicaAdminDSN())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = replica.Close() }()
	follows := func() bool {
		t.Helper()
		var state string
		err := replica.QueryRowContext(t.Context(), "SELECT service_state FROM performance_schema.replication_applier_status").Scan(&state)
		if err != nil {
			t.Fatal(err)
		}
		return state == "ON"
	}
	bench := func(args ...string) (*exec.Cmd, *strings.Builder, *strings.Builder) {
		cmd := exec.CommandContext(t.Context(), binary, append([]string{"bench", "reconcile", "--total", "9000", "--alone", "1s", "--payments", "20", "--json"}, args...)...)
		cmd.Env = append(stack.Env(), "PATH="+os.Getenv("PATH"), "HOME="+os.Getenv("HOME"), "TMPDIR="+t.TempDir())
		var out, progress strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &progress
		return cmd, &out, &progress
	}

	t.Run("figures", func(t *testing.T) {
		// Small batches, so that a run of 1,000 takes long enough to stop the replica in it.
		cmd, out, progress := bench("--overdue", "1000", "--rate", "1000", "--set", "reconcile.batch=10")
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v\n%s", err, progress.String())
		}
		var got map[string]any
		if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
			t.Fatalf("%v in %q", err, out.String())
		}
		figure := func(name string) float64 {
			t.Helper()
			value, is := got[name].(float64)
			if !is || math.IsNaN(value) {
				t.Errorf("the figure %s is missing: %v", name, got[name])
			}
			return value
		}
		for _, w := range reconcileWays {
			if rate := figure(w.name + "_orders_per_second"); rate <= 0 || w.limited && rate > 1100 {
				t.Errorf("%s: %v orders/s", w.name, rate)
			}
			if peak := figure(w.name + "_peak_mb"); peak < 5 {
				t.Errorf("%s: a peak of %v MB", w.name, peak)
			}
			if p50, p99 := figure(w.name+"_pay_p50_ms"), figure(w.name+"_pay_p99_ms"); p50 <= 0 || p99 < p50 {
				t.Errorf("%s: payments p50 %v, p99 %v", w.name, p50, p99)
			}
			if ratio := figure(w.name + "_pay_p99_ratio"); math.Abs(ratio-figure(w.name+"_pay_p99_ms")/figure(w.name+"_alone_p99_ms")) > 1e-9 {
				t.Errorf("%s: ratio %v", w.name, ratio)
			}
		}
		settings, _ := got["settings"].(map[string]any)
		if settings["lapse reconcile.batch"] != "10" || settings["mysql sync_binlog"] == nil {
			t.Errorf("settings %v", settings)
		}
		if !follows() {
			t.Error("the replica is left stopped")
		}
		var left int
		if err := replica.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name LIKE 'lapse\\_bench%'").Scan(&left); err != nil || left != 0 {
			t.Errorf("%d databases are left, %v", left, err)
		}
	})
	t.Run("interrupted while the replica is stopped", func(t *testing.T) {
		cmd, _, progress := bench("--overdue", "300", "--set", "reconcile.batch=1")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 2*time.Minute, "the replica is stopped", func() bool { return !follows() })
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("it ended with %v, want exit code 1\n%s", err, progress.String())
		}
		if !follows() {
			t.Error("the replica is left stopped")
		}
	})
}

func TestABenchOfReconcileSaysWhatIsNotThere(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, test := range map[string]struct {
		args []string
		env  map[string]string
		code int
		says string
	}{
		"no replica":           {nil, map[string]string{"LAPSE_TEST_REPLICA_ADMIN_DSN": "root@tcp(127.0.0.1:1)/"}, 3, "scripts/stack up --with replica"},
		"no one to stop it":    {nil, map[string]string{"LAPSE_MYSQL_DSN_REPLICA": "lapse@tcp(127.0.0.1:1)/lapse"}, 3, "LAPSE_TEST_REPLICA_ADMIN_DSN"},
		"replica not there":    {nil, map[string]string{"LAPSE_MYSQL_DSN_REPLICA": "lapse@tcp(127.0.0.1:1)/lapse", "LAPSE_TEST_REPLICA_ADMIN_DSN": "root@tcp(127.0.0.1:1)/"}, 3, "the replica is not there"},
		"too few orders":       {[]string{"--total", "3000", "--overdue", "1000", "--payments", "10"}, nil, 2, "it is at least 4860"},
		"no payments":          {[]string{"--payments", "0"}, nil, 2, "payments are 0 a second"},
		"too few overdue ones": {[]string{"--overdue", "99"}, nil, 2, "overdue is 99"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), b.binary, append([]string{"bench", "reconcile"}, test.args...)...)
			for k, v := range b.env {
				cmd.Env = append(cmd.Env, k+"="+v)
			}
			for k, v := range test.env {
				cmd.Env = append(cmd.Env, k+"="+v)
			}
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != test.code || !strings.Contains(string(out), test.says) {
				t.Errorf("%v, want exit code %d and %q:\n%s", err, test.code, test.says, out)
			}
		})
	}
}
