package trial

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"
)

// newTestCrew makes a crew of this test binary, playing the role. What ends unasked is sent to the channel.
func newTestCrew(t *testing.T, role string) (*crew, <-chan error) {
	t.Helper()
	binary, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	died := make(chan error, 10)
	c := newCrew(binary, []string{envRole + "=" + role}, t.TempDir(), func(err error) { died <- err })
	t.Cleanup(func() { _ = c.end(0) })
	return c, died
}

func startReady(t *testing.T, c *crew, name string) *process {
	t.Helper()
	p, err := c.start(name)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := c.waitReady(ctx, p); err != nil {
		t.Fatal(err)
	}
	return p
}

func gone(p *process) bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

func TestProcessesEndWhenTheyAreAsked(t *testing.T) {
	t.Parallel()
	c, died := newTestCrew(t, "ready")
	a, b := startReady(t, c, "a"), startReady(t, c, "b")
	if err := c.end(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	if !gone(a) || !gone(b) || len(died) != 0 {
		t.Errorf("a gone %t, b gone %t, %d died", gone(a), gone(b), len(died))
	}
	if err := c.end(0); err != nil {
		t.Errorf("a second end: %v", err)
	}
	if _, err := c.start("c"); err == nil {
		t.Error("a process was started after the end")
	}
}

func TestAProcessThatDoesNotListenIsKilled(t *testing.T) {
	t.Parallel()
	c, _ := newTestCrew(t, "deaf")
	p := startReady(t, c, "deaf one")
	err := c.end(50 * time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "deaf one did not end within 50ms and was killed") {
		t.Error(err)
	}
	if !gone(p) {
		t.Error("it still runs")
	}
}

func TestAProcessThatEndsByItselfSaysItsLastWords(t *testing.T) {
	t.Parallel()
	c, died := newTestCrew(t, "dies")
	p, err := c.start("mortal")
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-died:
		for _, part := range []string{"mortal ended by itself", "exit status 7", "the last thing it said"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("no %q in %v", part, err)
			}
		}
	case <-time.After(20 * time.Second):
		t.Fatal("nobody was told")
	}
	if err := c.waitReady(t.Context(), p); err == nil || !strings.Contains(err.Error(), "the last thing it said") {
		t.Error(err)
	}
}

func TestAKilledProcessIsNotReportedAndItsSuccessorRuns(t *testing.T) {
	t.Parallel()
	c, died := newTestCrew(t, "ready")
	p := startReady(t, c, "consumer 1")
	if err := c.kill(p); err != nil {
		t.Fatal(err)
	}
	if !gone(p) || p.err == nil || p.err.Error() != "signal: killed" {
		t.Errorf("gone %t, %v", gone(p), p.err)
	}
	startReady(t, c, "consumer 1")
	if err := c.end(20 * time.Second); err != nil {
		t.Error(err)
	}
	if len(died) != 0 {
		t.Errorf("reported: %v", <-died)
	}
}

func TestWhatAProcessLacksIsSaid(t *testing.T) {
	t.Parallel()
	c, _ := newTestCrew(t, "unready")
	p, err := c.start("a")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "it says what it lacks", func() bool { _, says := c.ask(t.Context(), p); return says != "" })
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := c.waitReady(ctx, p); err == nil || !strings.Contains(err.Error(), "the broker is on holiday") {
		t.Error(err)
	}
}

func TestTheReasonsOfAReadyzAreFound(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"ready":false,"checks":[{"name":"broker","missing":"no route"},{"name":"relay","ready":true},{"name":"database","missing":"read-only"}]}`: "broker: no route; database: read-only",
		"plain text\n":    "plain text",
		`{"ready":false}`: "",
	} {
		if got := missing([]byte(body)); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}
