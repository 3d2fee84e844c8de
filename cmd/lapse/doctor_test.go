package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lapse-orders/lapse/internal/ops"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
	"github.com/lapse-orders/lapse/internal/stacktest"
)

// findings decodes what doctor --json prints.
func findings(t *testing.T, stdout string) (found map[string]ops.Finding, count map[ops.Verdict]int) {
	t.Helper()
	var told struct {
		Sound      int
		Wrong      int
		NotChecked int `json:"not_checked"`
		Checks     []ops.Finding
	}
	if err := json.Unmarshal([]byte(stdout), &told); err != nil {
		t.Fatalf("%v in %s", err, stdout)
	}
	found = map[string]ops.Finding{}
	for _, f := range told.Checks {
		found[f.Name] = f
	}
	return found, map[ops.Verdict]int{ops.Sound: told.Sound, ops.Wrong: told.Wrong, ops.NotChecked: told.NotChecked}
}

// The stack's own environment, as `scripts/stack env` prints it, is what a sound installation looks like.
func TestTheDoctorFindsNothingWrongWithTheStack(t *testing.T) {
	t.Parallel()
	b := stacktest.Shared(t)
	// Another doctor may be at work on the stack's own topic.
	environ := append(os.Environ(), "LAPSE_DOCTOR_TOPIC="+b.NewTopic(t, admin.Delay), "LAPSE_DOCTOR_GROUP="+b.NewGroup(t, 16))
	if code, _, stderr := lapse(t, environ, "migrate", "up"); code != 0 {
		t.Fatalf("migrate up: exit code %d, %s", code, stderr)
	}
	code, stdout, stderr := lapse(t, environ, "doctor", "--json", "--set", "doctor.timeout=1m")
	found, count := findings(t, stdout)
	var unchecked []string
	for name, f := range found {
		switch {
		case f.Verdict == ops.Wrong:
			t.Errorf("%s is wrong: %s", name, f.Found)
		case f.Verdict == ops.NotChecked:
			unchecked = append(unchecked, name)
		case f.Found == "" || f.Why == "":
			t.Errorf("%s does not say what it found, or why it matters: %+v", name, f)
		}
	}
	if want := []string{"broker.events_topic"}; !slices.Equal(unchecked, want) {
		t.Errorf("not checked are %v, want %v:\n%s", unchecked, want, stdout)
	}
	if code != 0 || stderr != "" || count[ops.Sound] != len(found)-1 || count[ops.Wrong] != 0 || len(found) != len(ops.Checks()) {
		t.Errorf("exit code %d, stderr %q, %v of %d checks", code, stderr, count, len(found))
	}
}

// nowhere is an environment in which nothing answers, so that a doctor is done at once.
func nowhere(t *testing.T) []string {
	addr := closedAddr(t)
	return []string{"LAPSE_MYSQL_DSN=lapse:hunter2@tcp(" + addr + ")/lapse", "LAPSE_ROCKETMQ_ENDPOINTS=" + addr, "LAPSE_DOCTOR_TIMEOUT=5s"}
}

func TestTheDoctorSaysWhatIsWrongWhyAndWhatMendsIt(t *testing.T) {
	t.Parallel()
	environ := append(nowhere(t), "LAPSE_RELAY_TIK=1s")
	code, stdout, stderr := lapse(t, environ, "doctor")
	if code != 1 || !regexp.MustCompile(`^lapse: 3 of \d+ checks found something wrong\n$`).MatchString(stderr) {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
	for _, part := range []string{
		"✗ environment             the environment variable LAPSE_RELAY_TIK is no setting of lapse; did you mean LAPSE_RELAY_TICK?\n    why: ", "    fix: unset it",
		"✗ mysql.reachable ", "connection refused\n    why: Nothing works without the database", "    fix: set LAPSE_MYSQL_DSN",
		"✗ broker.reachable ", "    fix: set LAPSE_ROCKETMQ_ENDPOINTS",
		"– mysql.isolation         not checked: the database does not answer, see mysql.reachable\n",
		" sound, 3 wrong, ",
	} {
		if !strings.Contains(stdout, part) {
			t.Errorf("it does not say %q:\n%s", part, stdout)
		}
	}
	if strings.Contains(stdout, "hunter2") {
		t.Error("it shows a password")
	}
	// The same as JSON.
	code, stdout, _ = lapse(t, environ, "doctor", "--json")
	found, count := findings(t, stdout)
	if f := found["environment"]; code != 1 || count[ops.Wrong] != 3 || f.Verdict != ops.Wrong || f.Fix == "" || !strings.Contains(f.Found, "LAPSE_RELAY_TIK") {
		t.Errorf("exit code %d, %v, %+v", code, count, f)
	}
	// Why all of them matter.
	_, stdout, _ = lapse(t, environ, "doctor", "--explain")
	if n := strings.Count(stdout, "    why: "); n != len(ops.Checks()) {
		t.Errorf("--explain gives %d reasons for %d checks", n, len(ops.Checks()))
	}
}

// Kubernetes sets variables for each service in every pod. They are no slips.
func TestVariablesOfKubernetesAreNoSlips(t *testing.T) {
	t.Parallel()
	environ := append(nowhere(t), "LAPSE_API_SERVICE_HOST=10.0.0.1", "LAPSE_API_SERVICE_PORT=9880", "LAPSE_API_SERVICE_PORT_HTTP=9880", "LAPSE_API_PORT=tcp://10.0.0.1:9880",
		"LAPSE_API_PORT_9880_TCP=tcp://10.0.0.1:9880", "LAPSE_API_PORT_9880_TCP_ADDR=10.0.0.1", "LAPSE_API_PORT_9880_TCP_PORT=9880", "LAPSE_API_PORT_9880_TCP_PROTO=tcp")
	_, stdout, _ := lapse(t, environ, "doctor", "--json")
	found, _ := findings(t, stdout)
	if f := found["environment"]; f.Verdict != ops.Sound {
		t.Errorf("the environment is %q: %s", f.Verdict, f.Found)
	}
	_, stdout, _ = lapse(t, append(environ, "LAPSE_HTTP_PORT=9870"), "doctor", "--json")
	found, _ = findings(t, stdout)
	if f := found["environment"]; f.Verdict != ops.Wrong || !strings.Contains(f.Found, "LAPSE_HTTP_PORT") || strings.Contains(f.Found, "LAPSE_API") {
		t.Errorf("the environment is %q: %s", f.Verdict, f.Found)
	}
}

// The accounts are those that the services would take.
func TestTheDoctorLooksAtTheAccountsOfTheServices(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		environ []string
		want    string
	}{
		"one for all": {[]string{"LAPSE_MYSQL_DSN=a@tcp(db:1)/x"},
			"api=mysql.dsn relay=mysql.dsn consume=mysql.dsn reconcile=mysql.dsn migrate=mysql.dsn"},
		"one for each": {[]string{"LAPSE_MYSQL_DSN=a@tcp(db:1)/x", "LAPSE_MYSQL_DSN_RELAY=b@tcp(db:1)/x", "LAPSE_MYSQL_DSN_CONSUME=c@tcp(db:1)/x", "LAPSE_MYSQL_DSN_READ=d@tcp(db:1)/x",
			"LAPSE_MYSQL_DSN_RECONCILE=e@tcp(db:1)/x", "LAPSE_MYSQL_DSN_REFUND=f@tcp(db:1)/x", "LAPSE_MYSQL_DSN_MIGRATE=g@tcp(db:1)/x"},
			"api=mysql.dsn relay=mysql.dsn_relay consume=mysql.dsn_consume reconcile=mysql.dsn_reconcile refund=mysql.dsn_refund read=mysql.dsn_read migrate=mysql.dsn_migrate"},
		"a relay's host": {[]string{"LAPSE_MYSQL_DSN_RELAY=b@tcp(db:1)/x"}, "relay=mysql.dsn_relay"},
	} {
		cfg := mustLoad(t, sources{environ: tc.environ}).doctor()
		var got []string
		for _, a := range cfg.Accounts {
			if a.DSN != "" {
				got = append(got, a.Role+"="+a.Key)
			}
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: %v, want %s", name, got, tc.want)
		}
	}
}

func TestEveryCheckOfTheDoctorIsDocumented(t *testing.T) {
	t.Parallel()
	code, list, stderr := lapse(t, nil, "doctor", "--list")
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d, stderr %q", code, stderr)
	}
	page, err := os.ReadFile("../../docs/doctor.md")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for _, c := range ops.Checks() {
		fmt.Fprintf(&want, "| `%s` | %s |\n", c.Name, c.Why)
		if !strings.Contains(list, c.Name) || !strings.Contains(list, c.Why) {
			t.Errorf("--list does not tell of %s", c.Name)
		}
	}
	if !strings.Contains(string(page), want.String()) {
		t.Errorf("docs/doctor.md has not this table:\n%s", want.String())
	}
}

func TestWhatServersSayDoesNotSteerTheTerminal(t *testing.T) {
	t.Parallel()
	if got := printable("a\x1b[31mb\nc\u009bd é"); got != `a\x1b[31mb c\u009bd é` {
		t.Errorf("got %q", got)
	}
}
