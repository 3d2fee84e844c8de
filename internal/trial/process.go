// Processes of the own binary. Three rules hold here: a process that ends unasked ends the run, with its last words; what was started is
// ended, whatever happens; and where the system can do it (Linux), it ends with us even when we are killed with SIGKILL.

package trial

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// crew is the processes of a run. start, kill and end may be called from several goroutines.
type crew struct {
	binary string
	env    []string
	dir    string            // for the logs
	died   func(cause error) // called when a process ends unasked
	starts chan func()       // work for the goroutine that starts processes
	mu     sync.Mutex        // guards the following
	all    map[*process]bool // that run
	over   bool              // no process may be started any more
	client http.Client       // asks the processes whether they are ready
}

// process is one process of a crew.
type process struct {
	name   string
	addr   string // of its HTTP endpoint
	log    string // path
	cmd    *exec.Cmd
	asked  bool          // it was told to end; guarded by crew.mu
	exited chan struct{} // closed when it is gone; err is set then
	err    error
}

// newCrew makes a crew. Call end when it is done, even if nothing was started.
func newCrew(binary string, env []string, dir string, died func(error)) *crew {
	c := &crew{
		binary: binary, env: env, dir: dir, died: died, starts: make(chan func()), all: map[*process]bool{},
		client: http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
	}
	go func() {
		// A process with a parent-death signal gets it when the thread that started it ends, and Go ends threads at will. So all
		// are started on one thread, which is kept until end closes the channel.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for start := range c.starts {
			start()
		}
	}()
	return c
}

// start starts the binary with arguments; http.addr is added to them. It does not wait until the process is ready.
func (c *crew) start(name string, args ...string) (*process, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, addr: addr}
	return p, c.launch(p, nil, append(args, "--set", "http.addr="+addr)...)
}

// ran is a process that has run to its end.
type ran struct {
	stdout    []byte
	code      int    // its exit code
	lastWords string // of its log
	used      usage  // as it was seen last, at most lookAtUsage before its end; zero where it cannot be seen
}

const lookAtUsage = 50 * time.Millisecond

// run runs the binary with arguments to its end. That is nothing unasked, whatever the exit code is. The error says that it could not be
// started, or that ctx or the crew ended before it.
func (c *crew) run(ctx context.Context, name string, args ...string) (r ran, err error) {
	var out bytes.Buffer
	p := &process{name: name, asked: true}
	if err := c.launch(p, &out, args...); err != nil {
		return ran{}, err
	}
	look := time.NewTicker(lookAtUsage)
	defer look.Stop()
	for over := false; !over; {
		select {
		case <-look.C:
			// One that has ended and was not waited for yet is still there, without memory.
			if used, seen := usageOf(p.cmd.Process.Pid); seen && used.peak > 0 {
				r.used = used
			}
		case <-p.exited:
			over = true
		case <-ctx.Done():
			_ = p.cmd.Process.Kill() // gone already, if it fails
			<-p.exited
			return ran{}, fmt.Errorf("%s was ended: %w; its last words:\n%s", name, ctx.Err(), p.lastWords())
		}
	}
	r.stdout, r.lastWords = out.Bytes(), p.lastWords()
	var exit *exec.ExitError
	switch {
	case p.err == nil:
	case errors.As(p.err, &exit) && exit.Exited():
		r.code = exit.ExitCode()
	default:
		return ran{}, fmt.Errorf("%s ended with %w; its last words:\n%s", name, p.err, r.lastWords)
	}
	return r, nil
}

// launch starts a process. Its output goes to its log, but for stdout where that is not nil.
func (c *crew) launch(p *process, stdout io.Writer, args ...string) error {
	p.log, p.exited = filepath.Join(c.dir, strings.ReplaceAll(p.name, " ", "-")+".log"), make(chan struct{})
	// Appended to: the successor of a killed process goes on in the same file.
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("start %s: open its log: %w", p.name, err)
	}
	defer log.Close()                       //nolint:errcheck // the process has its own handle
	p.cmd = exec.Command(c.binary, args...) //nolint:gosec,noctx // our own binary; end ends it, in its own way
	p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = c.env, log, log
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	p.cmd.SysProcAttr = childAttr()

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return fmt.Errorf("start %s: the run is over", p.name)
	}
	started := make(chan error)
	c.starts <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	c.all[p] = true
	go c.watch(p) // ends with the process
	return nil
}

func (c *crew) watch(p *process) {
	p.err = p.cmd.Wait()
	c.mu.Lock()
	asked := p.asked
	delete(c.all, p)
	c.mu.Unlock()
	close(p.exited)
	if !asked {
		c.died(fmt.Errorf("%s ended by itself (%w); its last words:\n%s", p.name, exitError(p.err), p.lastWords()))
	}
}

func exitError(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// waitReady waits until the process says that it is ready, and gives its own words for what is missing when ctx ends before.
func (c *crew) waitReady(ctx context.Context, p *process) error {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	lacks := "it does not answer"
	for {
		ready, says := c.ask(ctx, p)
		if ready {
			return nil
		}
		if says != "" {
			lacks = says
		}
		select {
		case <-ticker.C:
		case <-p.exited:
			return fmt.Errorf("%s ended before it was ready; its last words:\n%s", p.name, p.lastWords())
		case <-ctx.Done():
			return fmt.Errorf("%s does not become ready: %s (its log: %s): %w", p.name, lacks, p.log, ctx.Err())
		}
	}
}

func (c *crew) ask(ctx context.Context, p *process) (ready bool, says string) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.addr+"/readyz", nil) //nolint:gosec // an address on the loopback that freeAddr gave
	if err != nil {
		return false, err.Error()
	}
	response, err := c.client.Do(request) //nolint:gosec // the same
	if err != nil {
		return false, "" // not listening yet
	}
	defer response.Body.Close() //nolint:errcheck // read only
	if response.StatusCode == http.StatusOK {
		return true, ""
	}
	body, _ := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	return false, missing(body)
}

// missing gives what a /readyz says is not there: the reasons in its JSON, or its text.
func missing(body []byte) string {
	var answer struct {
		Checks []struct{ Name, Missing string }
	}
	if json.Unmarshal(body, &answer) != nil {
		return strings.TrimSpace(string(body))
	}
	var all []string
	for _, c := range answer.Checks {
		if c.Missing != "" {
			all = append(all, c.Name+": "+c.Missing)
		}
	}
	return strings.Join(all, "; ")
}

// kill ends a process with SIGKILL and waits until it is gone.
func (c *crew) kill(p *process) error {
	c.mu.Lock()
	p.asked = true
	c.mu.Unlock()
	if err := p.cmd.Process.Kill(); err != nil {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.exited
	return nil
}

// end asks every process to end, waits for up to grace, and kills what is left. It gives what did not end as it should. It may be called
// again, and does nothing then.
func (c *crew) end(grace time.Duration) error {
	c.mu.Lock()
	if c.over {
		c.mu.Unlock()
		return nil
	}
	c.over = true
	defer close(c.starts) // not before the processes are gone, see newCrew
	var all []*process
	for p := range c.all {
		p.asked = true
		all = append(all, p)
	}
	c.mu.Unlock()
	for _, p := range all {
		if p.cmd.Process.Signal(syscall.SIGTERM) != nil {
			_ = p.cmd.Process.Kill() // a system without SIGTERM, or it is gone already
		}
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	var errs []error
	late := false
	for _, p := range all {
		if !late {
			select {
			case <-p.exited:
			case <-timer.C:
				late = true
			}
		}
		select {
		case <-p.exited:
			if p.err != nil {
				errs = append(errs, fmt.Errorf("%s was asked to end and did so with %w; its last words:\n%s", p.name, p.err, p.lastWords()))
			}
		default:
			_ = p.cmd.Process.Kill()
			<-p.exited
			errs = append(errs, fmt.Errorf("%s did not end within %s and was killed; its last words:\n%s", p.name, grace, p.lastWords()))
		}
	}
	return errors.Join(errs...)
}

// lastWords gives the last lines of the process's log.
func (p *process) lastWords() string {
	const lines, bytes = 15, 16 << 10
	f, err := os.Open(p.log) //nolint:gosec // in our own folder
	if err != nil {
		return "  (" + err.Error() + ")"
	}
	defer f.Close() //nolint:errcheck // read only
	if info, err := f.Stat(); err == nil && info.Size() > bytes {
		_, _ = f.Seek(-bytes, io.SeekEnd)
	}
	text, _ := io.ReadAll(f)
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return "  " + strings.Join(all[max(len(all)-lines, 0):], "\n  ")
}

// freeAddr finds a free port on the loopback, below those that the system gives to outgoing connections: of these, the many that a run
// opens would soon take it. Somebody else may take it before the process does; the process then says so and ends.
func freeAddr() (string, error) {
	const low, high = 20_000, 32_000
	var err error
	for range 100 {
		var l net.Listener
		addr := fmt.Sprintf("127.0.0.1:%d", low+rand.IntN(high-low)) //nolint:gosec // has to be free, not secret
		if l, err = net.Listen("tcp", addr); err == nil {            //nolint:noctx // returns at once
			return addr, l.Close()
		}
	}
	return "", fmt.Errorf("find a free port: %w", err)
}
