package trial

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
)

func TestWhatAProcessUsesIsSeen(t *testing.T) {
	t.Parallel()
	before, seen := usageOf(os.Getpid())
	if !seen || before.now < 1<<20 || before.peak < before.now {
		t.Fatalf("%+v, seen %t", before, seen)
	}
	eventually(t, 20*time.Second, "more CPU is used", func() bool {
		for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); {
		}
		after, _ := usageOf(os.Getpid())
		return after.cpu > before.cpu
	})
	if _, seen := usageOf(1 << 30); seen {
		t.Error("a process that does not exist uses something")
	}
}

func TestTheProcessBehindAPortIsFound(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if pid := listener(port); pid != os.Getpid() {
		t.Errorf("pid %d, want %d", pid, os.Getpid())
	}
	_ = l.Close()
	if pid := listener(port); pid == os.Getpid() {
		t.Error("found though nobody listens")
	}
}

func TestABurstOnRealServersGivesItsFiguresAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	b := setup(t)
	broker := stacktest.Require(t, "LAPSE_TEST_BROKER_ADMIN")
	cmd := exec.CommandContext(t.Context(), b.binary, "bench", "burst", "--orders", "300", "--repeat", "1", "--one-by-one-workers", "4", "--limit-workers", "2", "--json", "--broker-admin", broker)
	for k, v := range b.env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	var out, progress strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &progress
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	var got struct {
		Bench    string
		Orders   int
		Ratio    float64 `json:"one_by_one_ratio"`
		Limit    float64 `json:"limit_ratio"`
		Rate     float64 `json:"orders_per_second"`
		P50      float64 `json:"lateness_p50_ms"`
		Max      float64 `json:"lateness_max_ms"`
		Messages float64
		Peak     float64 `json:"consume_peak_mb"`
		Settings map[string]string
	}
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatalf("%v in %q", err, out.String())
	}
	if got.Bench != "burst" || got.Orders != 300 || got.Ratio <= 0 || got.Limit <= 0 || got.Rate <= 0 || got.P50 < 0 || got.Max < got.P50 || got.Peak < 5 {
		t.Errorf("%+v", got)
	}
	// Eleven ticks, and one more each for those that were sent in two parts.
	if got.Messages < 10 || got.Messages >= 150 {
		t.Errorf("%v messages for 300 orders in one second: they are not coalesced", got.Messages)
	}
	for _, name := range []string{"mysql sync_binlog", "mysql innodb_flush_log_at_trx_commit", "broker flushDiskType", "broker timerPrecisionMs"} {
		if got.Settings[name] == "" {
			t.Errorf("the setting %s is missing: %v", name, got.Settings)
		}
	}

	// Its database and topic: the next test, which knows their names.
	dir, err := os.ReadDir(b.temp)
	if err != nil || len(dir) > 0 {
		t.Errorf("left in the folder for temporary files: %v, %v", dir, err)
	}
	if pids := b.running(t, ""); len(pids) > 0 {
		t.Errorf("processes %v are left", pids)
	}
	if _, err := admin.New(broker).Topic(t.Context(), b.env["LAPSE_ROCKETMQ_TOPIC"]); err != nil {
		t.Errorf("the configured topic, which is not the bench's, is gone: %v", err)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM orders"); n != 0 {
		t.Errorf("%d orders are in the configured database, which is not the bench's", n)
	}
}

func TestABenchThatIsInterruptedDropsItsDatabaseAndItsTopic(t *testing.T) {
	t.Parallel()
	b := setup(t)
	broker := stacktest.Require(t, "LAPSE_TEST_BROKER_ADMIN")
	cmd := exec.CommandContext(t.Context(), b.binary, "bench", "pending", "--orders", "1000000", "--broker-admin", broker)
	for k, v := range b.env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var relay []int
	eventually(t, time.Minute, "its relay runs", func() bool {
		relay = b.running(t, "\x00relay\x00")
		return len(relay) > 0
	})
	database, topic := databaseAndTopicOf(t, relay[0])
	if !strings.HasPrefix(database, "lapse_bench_") || !strings.HasPrefix(topic, "lapse-bench-") {
		t.Fatalf("database %q, topic %q", database, topic)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("it ended with %v, want exit code 1", err)
	}
	if n := b.db.Int(t, "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = ?", database); n != 0 {
		t.Errorf("the database %s is left", database)
	}
	if _, err := admin.New(broker).Topic(t.Context(), topic); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("the topic %s is left: %v", topic, err)
	}
}

// databaseAndTopicOf reads what a process of a bench was given.
func databaseAndTopicOf(t *testing.T, pid int) (database, topic string) {
	t.Helper()
	p := "/proc/" + strconv.Itoa(pid)
	environ, _ := os.ReadFile(p + "/environ")
	for _, v := range strings.Split(string(environ), "\x00") {
		if strings.HasPrefix(v, "LAPSE_MYSQL_DSN=") {
			database, _, _ = strings.Cut(v[strings.LastIndex(v, "/")+1:], "?")
		}
	}
	command, _ := os.ReadFile(p + "/cmdline")
	for _, v := range strings.Split(string(command), "\x00") {
		if name, found := strings.CutPrefix(v, "rocketmq.topic="); found {
			topic = name
		}
	}
	return database, topic
}
