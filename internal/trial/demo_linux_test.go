package trial

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
	"github.com/lapse-orders/lapse/orders"
)

// bundle is what one test's demo runs in: a database, a topic and a group of its own, on the shared stack.
type bundle struct {
	db     *mysqltest.DB
	binary string
	env    map[string]string
	mark   string // in the environment of everything that the demo starts
	temp   string // where the demo keeps its logs
}

func setup(t *testing.T) *bundle {
	t.Helper()
	broker, db := stacktest.Shared(t), mysqltest.New(t)
	b := &bundle{db: db, mark: "LAPSE_TEST_MARK=" + db.Name, temp: t.TempDir()}
	b.env = map[string]string{
		"PATH": os.Getenv("PATH"), "HOME": os.Getenv("HOME"), "TMPDIR": b.temp, "LAPSE_TEST_MARK": db.Name,
		"LAPSE_ROCKETMQ_ENDPOINTS": broker.Endpoints, "LAPSE_ROCKETMQ_TLS_ENABLED": "false",
		"LAPSE_TEST_NAMESRV_ADMIN": os.Getenv("LAPSE_TEST_NAMESRV_ADMIN"), // set where the stack is in containers
		"LAPSE_ROCKETMQ_TOPIC":     broker.NewTopic(t, admin.Delay), "LAPSE_ROCKETMQ_GROUP": broker.NewGroup(t, 16),
	}
	for _, name := range []string{"LAPSE_MYSQL_DSN", "LAPSE_MYSQL_DSN_MIGRATE", "LAPSE_MYSQL_DSN_RELAY", "LAPSE_MYSQL_DSN_CONSUME", "LAPSE_MYSQL_DSN_READ", "LAPSE_MYSQL_DSN_RECONCILE", "LAPSE_MYSQL_DSN_REFUND"} {
		b.useAccount(t, name)
	}
	var err error
	if b.binary, err = buildLapse(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pid := range b.running(t, "") {
			t.Errorf("process %d is left", pid)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return b
}

// useAccount gives the demo one of the stack's own accounts, with just the rights of its role, in the test's database.
func (b *bundle) useAccount(t *testing.T, name string) {
	t.Helper()
	dsn, err := mysql.ParseDSN(stacktest.Require(t, name))
	if err != nil {
		t.Fatalf("%s cannot be read", name)
	}
	dsn.DBName = b.db.Name
	b.env[name] = dsn.FormatDSN()
}

// replica is the variable that names the replica to the demo: the tests have it where they want reconcile.
const replica = "LAPSE_MYSQL_DSN_REPLICA"

// running gives the processes that the bundle's demo started, itself included, whose command line contains a text.
func (b *bundle) running(t *testing.T, text string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// A process may be gone between the listing and the reading.
		environ, _ := os.ReadFile("/proc/" + e.Name() + "/environ")
		command, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if slices.Contains(strings.Split(string(environ), "\x00"), b.mark) && strings.Contains(string(command), text) && alive(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// run is a demo under way. Its output is read line by line.
type run struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	lines  chan string // of stdout
	seen   []string
}

func (b *bundle) start(t *testing.T, args ...string) *run {
	t.Helper()
	r := &run{lines: make(chan string, 10_000)}
	r.cmd = exec.CommandContext(t.Context(), b.binary, append([]string{"demo"}, args...)...)
	for k, v := range b.env {
		r.cmd.Env = append(r.cmd.Env, k+"="+v)
	}
	r.cmd.Stderr = &r.stderr
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { // ends with the process
		defer close(r.lines)
		scanner := bufio.NewScanner(out)
		for scanner.Scan() {
			r.lines <- scanner.Text()
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	return r
}

// until waits for a line that contains a text.
func (r *run) until(t *testing.T, text string) {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		select {
		case line, open := <-r.lines:
			if !open {
				t.Fatalf("ended without a line %q:\n%s\n%s", text, strings.Join(r.seen, "\n"), r.stderr.String())
			}
			r.seen = append(r.seen, line)
			if strings.Contains(line, text) {
				return
			}
		case <-limit:
			t.Fatalf("no line %q:\n%s", text, strings.Join(r.seen, "\n"))
		}
	}
}

// wait waits for the end and gives the exit code and all of stdout.
func (r *run) wait(t *testing.T) (code int, stdout string) {
	t.Helper()
	limit := time.After(3 * time.Minute)
	for open := true; open; {
		var line string
		select {
		case line, open = <-r.lines:
			if open {
				r.seen = append(r.seen, line)
			}
		case <-limit:
			_ = r.cmd.Process.Kill()
			t.Fatalf("the demo does not end:\n%s\n%s", strings.Join(r.seen, "\n"), r.stderr.String())
		}
	}
	err := r.cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		code = exit.ExitCode()
	default:
		t.Fatal(err)
	}
	return code, strings.Join(r.seen, "\n")
}

// report waits for the end, which has to be a good one, and reads the JSON.
func (r *run) report(t *testing.T) (report Report) {
	t.Helper()
	code, stdout := r.wait(t)
	if code != 0 {
		t.Fatalf("exit code %d:\n%s\n%s", code, stdout, r.stderr.String())
	}
	decoder := json.NewDecoder(strings.NewReader(stdout))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatalf("%v:\n%s", err, stdout)
	}
	if rest, _ := io.ReadAll(decoder.Buffered()); strings.TrimSpace(string(rest)) != "" {
		t.Errorf("after the object: %q", rest)
	}
	return report
}

func TestReconcileFindsExactlyTheOrdersOfTheMessagesThatTheDemoLost(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.useAccount(t, replica)
	r := b.start(t, "--orders", "80", "--rate", "20", "--timeout", "3s", "--seed", "5", "--lose", "40", "--json")
	report := r.report(t)
	l, reconciled := report.Losses, report.Reconcile
	if l == nil || reconciled == nil {
		t.Fatalf("losses %+v, reconcile %+v", l, reconciled)
	}
	if !report.Holds || l.Percent != 40 || math.Abs(float64(l.Lost)-0.4*float64(l.Messages)) > 1 || l.Final+l.Later+l.Unpaid != l.Orders || l.Unpaid == 0 {
		t.Errorf("%+v, holds %t", l, report.Holds)
	}
	if len(reconciled.Orders) != l.Unpaid {
		t.Errorf("%d orders were left, and reconcile cancelled %+v", l.Unpaid, reconciled.Orders)
	}
	for _, o := range reconciled.Orders {
		if o.Missed != orders.MissedNotReceived || !strings.Contains(o.Because, "no consumer has handled it") {
			t.Errorf("%+v", o)
		}
		// By queries of this test's own: cancelled by that run, once, with an outbox row that says sent.
		if n := b.db.Int(t, `SELECT COUNT(*) FROM orders o JOIN outbox b ON b.order_id = o.id JOIN order_events e ON e.order_id = o.id
			WHERE o.id = ? AND o.status = 'cancelled' AND o.cancel_reason = 'timeout' AND b.state = 'sent' AND e.kind = 'reconciled' AND e.detail ->> '$.run' = ?`, o.ID, reconciled.Run); n != 1 {
			t.Errorf("order %d is not as the report says", o.ID)
		}
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM order_events WHERE kind = 'reconciled'"); n != int64(l.Unpaid) {
		t.Errorf("%d orders have been reconciled, want %d", n, l.Unpaid)
	}
	if report.Lateness.Orders != report.Total.Timeout-l.Unpaid {
		t.Errorf("the lateness is of %d orders, of %d timeouts %d are reconcile's", report.Lateness.Orders, report.Total.Timeout, l.Unpaid)
	}
	if !strings.Contains(r.stderr.String(), "a go-between, which loses 40 % of them") {
		t.Errorf("the progress does not say that messages are lost:\n%s", r.stderr.String())
	}
	b.leavesNothing(t)
}

func TestTheDemoHoldsEveryInvariantThoughAConsumerIsKilled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.useAccount(t, replica)
	r := b.start(t, "--orders", "60", "--rate", "20", "--timeout", "3s", "--seed", "1", "--json")
	report := r.report(t)
	if report.Losses != nil || report.Reconcile == nil || report.Reconcile.Run == 0 || len(report.Reconcile.Orders) != 0 {
		t.Errorf("nothing was lost: losses %+v, reconcile %+v", report.Losses, report.Reconcile)
	}
	for _, says := range []string{"placed", "killing consumer 1 with SIGKILL", "consumer 1 is ready again", "scripts/stack down"} {
		if !strings.Contains(r.stderr.String(), says) {
			t.Errorf("the progress does not say %q:\n%s", says, r.stderr.String())
		}
	}

	if !report.Holds || report.Orders != 60 || report.Seed != 1 || report.Timeout != "3s" || report.Took <= 0 {
		t.Errorf("%+v", report)
	}
	if len(report.Kills) != 1 || report.Kills[0].Process != "consumer 1" || report.Kills[0].Back <= 0 {
		t.Errorf("kills %+v", report.Kills)
	}
	total := report.Total
	if total.Orders != 60 || total.Unpaid != 0 || total.Refused+total.Paid+total.Timeout+total.Hand != 60 || total.Paid == 0 || total.Timeout == 0 || total.Hand == 0 || total.Refunds == 0 {
		t.Errorf("total %+v", total)
	}
	if total.Refused == 0 {
		t.Error("no stock ran out")
	}
	for _, k := range report.Kinds {
		if k.Orders == 0 {
			t.Errorf("no order of kind %s", k.Kind)
		}
	}
	if m := report.MoneyBack; m == nil || m.Refunds != total.Refunds || m.Amount != total.Refunded || m.Calls < m.Refunds {
		t.Errorf("money back %+v, refunds %d of %d", m, total.Refunds, total.Refunded)
	}
	if l := report.Lateness; l.Orders != total.Timeout || l.P50 < 0 || l.P50 > l.P99 || l.P99 > l.Max {
		t.Errorf("lateness %+v of %d timeouts", l, total.Timeout)
	}
	invariants := map[string]int64{}
	for _, c := range report.Checks {
		if c.Violations != 0 {
			t.Errorf("%s %s: %+v", c.Invariant, c.Name, c.Examples)
		}
		invariants[c.Invariant] += c.Rows
	}
	for _, i := range []string{"I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8"} {
		if invariants[i] == 0 {
			t.Errorf("%s looked at nothing", i)
		}
	}

	// The report against the tables, by queries of this test's own.
	for query, want := range map[string]int{
		"SELECT COUNT(*) FROM orders":                                                                                            total.Orders - total.Refused,
		"SELECT COUNT(*) FROM orders WHERE status = 'paid'":                                                                      total.Paid,
		"SELECT COUNT(*) FROM orders WHERE cancel_reason = 'timeout'":                                                            total.Timeout,
		"SELECT COUNT(*) FROM orders WHERE status = 'cancelled' AND cancel_reason <> 'timeout'":                                  total.Hand,
		"SELECT COUNT(*) FROM refunds":                                                                                           total.Refunds,
		"SELECT COUNT(*) FROM refunds WHERE state = 'done' AND gateway_refund_id <> ''":                                          total.Refunds,
		"SELECT SUM(amount) FROM refunds":                                                                                        int(total.Refunded),
		"SELECT MAX(TIMESTAMPDIFF(MICROSECOND, deadline_at, cancelled_at)) DIV 1000 FROM orders WHERE cancel_reason = 'timeout'": int(report.Lateness.Max),
		"SELECT COUNT(*) FROM parked":                                                                                            0,
	} {
		if got := b.db.Int(t, query); got != int64(want) {
			t.Errorf("%s: %d, the report says %d", query, got, want)
		}
	}
	b.leavesNothing(t)
}

// leavesNothing checks that the processes and the logs of an orderly end are gone.
func (b *bundle) leavesNothing(t *testing.T) {
	t.Helper()
	if left := b.running(t, ""); len(left) != 0 {
		t.Errorf("left processes: %v", left)
	}
	if left, err := os.ReadDir(b.temp); err != nil || len(left) != 0 {
		t.Errorf("left files: %v %v", left, err)
	}
}

func TestTheDemoFindsAPlantedViolation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('planted', 0, 5, 0)")
	r := b.start(t, "--orders", "20", "--rate", "20", "--timeout", "1s", "--seed", "2")
	code, stdout := r.wait(t)
	if code != 4 {
		t.Fatalf("exit code %d, want 4:\n%s\n%s", code, stdout, r.stderr.String())
	}
	for _, says := range []string{"✗ I2", "reserved_is_sum_of_unpaid: ", "SKU planted: reserved is 5, unpaid orders hold 0", "the invariants do not hold"} {
		if !strings.Contains(stdout, says) {
			t.Errorf("stdout does not say %q:\n%s", says, stdout)
		}
	}
	if !strings.Contains(r.stderr.String(), "invariant is broken") {
		t.Errorf("stderr: %s", r.stderr.String())
	}
}

// Orders of an interrupted run, of another checkout with other stock, and paid ones with old ids are not this run's business.
func TestLeftoversOfAnEarlierRunDoNotDisturb(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := b.start(t, "--orders", "40", "--rate", "40", "--timeout", "2s", "--seed", "3")
	r.until(t, "placed")
	eventually(t, time.Minute, "orders are there", func() bool { return b.db.Int(t, "SELECT COUNT(*) FROM orders") > 0 })
	if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code, stdout := r.wait(t); code != 1 {
		t.Fatalf("exit code %d:\n%s", code, stdout)
	}
	// An order that broke long ago is no order of the next run.
	b.db.Exec(t, "INSERT INTO orders (id, channel, user_id, currency, amount, status, created_at, paid_at) VALUES (5, 'old', '', 'EUR', 1, 'paid', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))")
	// And a refund of somebody's own gateway is not the demo's to make, or to give up.
	b.db.Exec(t, "INSERT INTO payments (gateway, transaction_id, order_id, currency, amount, received_at, outcome) VALUES ('bank', 'T-1', 5, 'EUR', 2, UTC_TIMESTAMP(3), 'accepted')")
	b.db.Exec(t, `INSERT INTO refunds (gateway, transaction_id, order_id, amount, currency, reason, state, attempts, created_at, available_at)
		VALUES ('bank', 'T-1', 5, 1, 'EUR', 'excess', 'pending', 0, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))`)
	if b.db.Int(t, "SELECT COUNT(*) FROM orders") < 2 {
		t.Fatal("the interrupted run left no orders")
	}
	r = b.start(t, "--orders", "20", "--rate", "20", "--timeout", "1s", "--seed", "4")
	code, stdout := r.wait(t)
	if code != 0 {
		t.Fatalf("exit code %d:\n%s\n%s", code, stdout, r.stderr.String())
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM refunds WHERE gateway = 'bank' AND state = 'pending' AND attempts = 0"); n != 1 || !strings.Contains(stdout, "the refunds are left alone") {
		t.Errorf("%d refunds of another gateway wait as before:\n%s", n, stdout)
	}
	b.leavesNothing(t)
}

func TestInterruptedAtAnyMomentTheDemoLeavesNoProcess(t *testing.T) {
	t.Parallel()
	for name, moment := range map[string]string{
		"while the processes start":     "starting a relay",
		"while orders are placed":       "placed",
		"while orders are cancelled":    "by timeout",
		"while a consumer is killed":    "killing consumer 1",
		"while reconcile runs":          "running reconcile",
		"while the processes are ended": "ending the processes",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.useAccount(t, replica)
			r := b.start(t, "--orders", "60", "--rate", "20", "--timeout", "2s")
			r.until(t, moment)
			if err := r.cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			code, stdout := r.wait(t)
			if code != 1 || !strings.Contains(r.stderr.String(), "interrupted") || !strings.Contains(stdout, "scripts/stack down") {
				t.Errorf("exit code %d, stdout:\n%s\nstderr:\n%s", code, stdout, r.stderr.String())
			}
			b.leavesNothing(t)
		})
	}
}

func TestAKilledDemoTakesItsProcessesWithIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := b.start(t, "--orders", "60", "--rate", "20", "--timeout", "3s")
	r.until(t, "placed")
	if n := len(b.running(t, "")); n != 5 {
		t.Errorf("%d processes run, want the demo, a relay, two consumers and the refunds", n)
	}
	if err := r.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if code, _ := r.wait(t); code != -1 {
		t.Errorf("exit code %d of a killed process", code)
	}
	eventually(t, 20*time.Second, "relay and consumers are gone", func() bool { return len(b.running(t, "")) == 0 })
}

func TestAProcessThatDiesUnaskedEndsTheDemo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := b.start(t, "--orders", "60", "--rate", "20", "--timeout", "10s")
	r.until(t, "placed")
	relays := b.running(t, "\x00relay\x00")
	if len(relays) != 1 {
		t.Fatalf("relays: %v", relays)
	}
	if err := syscall.Kill(relays[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	code, stdout := r.wait(t)
	if code != 1 || !strings.Contains(r.stderr.String(), "relay ended by itself (signal: killed); its last words:") || !strings.Contains(r.stderr.String(), "ready") {
		t.Errorf("exit code %d, stderr:\n%s", code, r.stderr.String())
	}
	if !strings.Contains(stdout, "the logs of the processes are in "+b.temp) {
		t.Errorf("stdout does not say where the logs are:\n%s", stdout)
	}
}

func TestTheDemoSaysWhatIsNotThere(t *testing.T) {
	t.Parallel()
	nobody, err := freeAddr()
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		change func(b *bundle)
		args   []string
		code   int
		says   []string
	}{
		"no MySQL":               {func(b *bundle) { b.env["LAPSE_MYSQL_DSN"] = "lapse:secret@tcp(" + nobody + ")/lapse" }, nil, 3, []string{"MySQL is not there", nobody, "scripts/stack up"}},
		"no RocketMQ":            {func(b *bundle) { b.env["LAPSE_ROCKETMQ_ENDPOINTS"] = nobody }, nil, 3, []string{"RocketMQ is not there", nobody, "scripts/stack up"}},
		"no addresses":           {func(b *bundle) { b.env["LAPSE_MYSQL_DSN"] = "" }, nil, 3, []string{"scripts/stack up"}},
		"no tables":              {func(b *bundle) { b.db.Exec(t, "DROP TABLE lapse_schema_version") }, nil, 3, []string{"lapse migrate up"}},
		"no replica":             {nil, []string{"--lose", "5"}, 3, []string{"mysql.dsn_replica, is not there", "scripts/stack up --with replica"}},
		"a replica that is down": {func(b *bundle) { b.env[replica] = "lapse:secret@tcp(" + nobody + ")/lapse" }, nil, 3, []string{"the replica is not there", nobody, "scripts/stack up --with replica"}},
		"too much to lose":       {nil, []string{"--lose", "101"}, 2, []string{"lose is 101 percent"}},
		"no orders":              {nil, []string{"--orders", "0"}, 2, []string{"orders is 0"}},
		"no rate":                {nil, []string{"--rate", "NaN"}, 2, []string{"rate is NaN"}},
		"too short timeout":      {nil, []string{"--timeout", "999ms"}, 2, []string{"timeout is 999ms"}},
		"an argument":            {nil, []string{"now"}, 2, []string{"now"}},
		"a bad key for all":      {nil, []string{"--set", "relay.tikc=1s"}, 2, []string{"relay.tick"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			if test.change != nil {
				test.change(b)
			}
			r := b.start(t, test.args...)
			code, stdout := r.wait(t)
			if code != test.code {
				t.Errorf("exit code %d, want %d:\n%s\n%s", code, test.code, stdout, r.stderr.String())
			}
			for _, says := range test.says {
				if !strings.Contains(r.stderr.String(), says) {
					t.Errorf("stderr does not say %q:\n%s", says, r.stderr.String())
				}
			}
			if strings.Contains(r.stderr.String(), "secret") {
				t.Errorf("the password is printed: %s", r.stderr.String())
			}
			b.leavesNothing(t)
		})
	}
}
