package lapse_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/lapsetest/mysqltest"
)

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// blocks gives the fenced blocks of one language.
func blocks(text, language string) []string {
	var found []string
	for _, m := range regexp.MustCompile("(?s)\n```"+language+"\n(.*?)\n```").FindAllStringSubmatch(text, -1) {
		found = append(found, m[1])
	}
	return found
}

// sources gives the Go files of the repository, tests or not.
func sources(t *testing.T, tests bool) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != "." && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") != tests:
			return nil
		}
		source, err := os.ReadFile(path) //nolint:gosec // paths of this repository
		all.Write(source)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

func TestEveryGuaranteeInTheReadmeNamesATestThatExists(t *testing.T) {
	t.Parallel()
	tests := sources(t, true)
	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(readme(t), -1)
	if len(named) < 5 {
		t.Fatalf("the README names %d tests; its guarantees have lost their proofs", len(named))
	}
	for _, m := range named {
		if !strings.Contains(tests, "func "+m[1]+"(") {
			t.Errorf("the README names %s, which does not exist", m[1])
		}
	}
}

func TestEveryMetricInTheReadmeExists(t *testing.T) {
	t.Parallel()
	code := sources(t, false)
	for _, m := range regexp.MustCompile(`lapse_[a-z_]+`).FindAllString(readme(t), -1) {
		name := strings.TrimSuffix(m, "_bucket")
		short := strings.TrimPrefix(name, "lapse_relay_")
		if !strings.Contains(code, `"`+name+`"`) && !strings.Contains(code, `"`+short+`"`) && name != "lapse_relay_" {
			t.Errorf("the README names the metric %s, which no code has", name)
		}
	}
}

// The snippets are built as files of this module, laid over its tree without being written into it.
func TestTheReadmesGoCodeCompiles(t *testing.T) {
	t.Parallel()
	snippets := blocks(readme(t), "go")
	if len(snippets) == 0 {
		t.Fatal("the README has no Go code")
	}
	for _, snippet := range snippets {
		dir := t.TempDir()
		file := filepath.Join(dir, "main.go")
		if err := os.WriteFile(file, []byte(snippet), 0o600); err != nil {
			t.Fatal(err)
		}
		root, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(root, "readmesnippet", "main.go"): file}})
		if err != nil {
			t.Fatal(err)
		}
		overlayFile := filepath.Join(dir, "overlay.json")
		if err := os.WriteFile(overlayFile, overlay, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlayFile, "-o", filepath.Join(dir, "snippet"), "./readmesnippet").CombinedOutput()
		if err != nil {
			t.Errorf("the README's code does not compile: %v\n%s\n%s", err, out, snippet)
		}
	}
}

// Every command of the README runs here as it stands there. The demo is a short one, and what runs until it is told to stop is told so
// once it says that it is ready.
func TestTheReadmesCommandsWork(t *testing.T) {
	mysqltest.AdminDSN(t) // the servers
	if os.Getenv("LAPSE_MYSQL_DSN") == "" {
		t.Fatal(`LAPSE_MYSQL_DSN is not set: eval "$(scripts/stack env)"`)
	}
	// Ports of their own, and the demo's flags, since others may run beside this test.
	env := append(os.Environ(), "LAPSE_HTTP_ADDR=127.0.0.1:0", "LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_LOG_FORMAT=json", "DEMO_ARGS=--orders 60 --rate 30 --timeout 3s")
	for _, block := range blocks(readme(t), "sh") {
		for line := range strings.Lines(block) {
			line, _, _ = strings.Cut(line, "#")
			line = strings.TrimSpace(line)
			if line == "" {
				continue
			}
			t.Run(line, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
				defer cancel()
				cmd := exec.CommandContext(ctx, "bash", "-euc", "exec env "+line)
				cmd.Env = env
				cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
				cmd.WaitDelay = 30 * time.Second
				printed, out, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				defer printed.Close() //nolint:errcheck // only read
				cmd.Stdout, cmd.Stderr = out, out
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				_ = out.Close() // the child has its own; ours would keep the pipe open
				runsUntilTold := slices.Contains([]string{"bin/lapse relay", "bin/lapse consume", "bin/lapse api", "bin/lapse all"}, line)
				told := false
				var all strings.Builder
				for lines := bufio.NewScanner(printed); lines.Scan(); {
					all.WriteString(lines.Text() + "\n")
					if runsUntilTold && !told && strings.Contains(lines.Text(), `"msg":"ready"`) {
						told = true
						if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
							t.Error(err)
						}
					}
				}
				if err := cmd.Wait(); err != nil || told != runsUntilTold {
					t.Errorf("%s: %v (told to stop: %t)\n%s", line, err, told, all.String())
				}
			})
		}
	}
}

// The requests of the README are sent as they stand there, to an API that takes them and to one that wants their signature.
func TestTheReadmesRequestsWork(t *testing.T) {
	t.Parallel()
	db := mysqltest.New(t)
	db.Exec(t, "INSERT INTO stock (sku, available, reserved, sold) VALUES ('tea-100g', 100, 0, 0)")
	requests := blocks(readme(t), "bash")
	if len(requests) != 1 {
		t.Fatalf("the README has %d blocks of requests, want 1", len(requests))
	}
	binary := filepath.Join(t.TempDir(), "lapse")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/lapse").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, secret := range []string{"", "the payment secret"} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, binary, "api")
		cmd.Env = []string{"LAPSE_MYSQL_DSN=" + db.DSN, "LAPSE_HTTP_ADDR=127.0.0.1:0", "LAPSE_API_ADDR=127.0.0.1:0", "LAPSE_LOG_FORMAT=json", "LAPSE_API_PAYMENT_SECRET=" + secret}
		printed, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var addr string
		var log strings.Builder
		for lines := bufio.NewScanner(printed); lines.Scan(); {
			log.WriteString(lines.Text() + "\n")
			var entry struct{ Msg, Addr string }
			if json.Unmarshal(lines.Bytes(), &entry) != nil {
				continue
			}
			if entry.Msg == "serving api" {
				addr = entry.Addr
			}
			if entry.Msg != "ready" {
				continue
			}
			out, err := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", strings.ReplaceAll(requests[0], "127.0.0.1:9880", addr)).CombinedOutput()
			if err != nil || !strings.Contains(string(out), `"outcome":"accepted"`) || !strings.Contains(string(out), `"kind":"paid"`) {
				t.Errorf("the README's requests: %v\n%s", err, out)
			}
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
		if err := cmd.Wait(); err != nil || addr == "" {
			t.Errorf("lapse api: %v\n%s", err, log.String())
		}
	}
}
