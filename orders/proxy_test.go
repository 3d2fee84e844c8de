package orders_test

import (
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"
)

// verdict is what a proxy does with one statement.
type verdict int

const (
	pass      verdict = iota
	cutBefore         // the connection breaks before the server has the statement
	cutAfter          // the server has done it, and the connection breaks before its answer arrives
)

// proxy stands between a client and the database. It keeps the text of every statement, as the server sees it, and breaks connections
// at the statement that a test names.
type proxy struct {
	dsn    string
	server string
	judge  atomic.Pointer[func(statement string) verdict]
	lis    net.Listener
	wg     sync.WaitGroup
	// rewrite changes statements on their way. Set it before the first connection.
	rewrite *strings.Replacer

	mu         sync.Mutex // guards both
	statements []string
	conns      map[net.Conn]bool
}

// newProxy listens on a loopback port until the test ends. options change the DSN that leads through it.
func newProxy(t testing.TB, dsn string, options ...func(*mysql.Config)) *proxy {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{server: cfg.Addr, conns: map[net.Conn]bool{}}
	if p.lis, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	cfg.Addr = p.lis.Addr().String()
	for _, o := range options {
		o(cfg)
	}
	p.dsn = cfg.FormatDSN()
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		_ = p.lis.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

// on sets what decides about each statement from here on; nil lets all pass.
func (p *proxy) on(judge func(statement string) verdict) {
	if judge == nil {
		p.judge.Store(nil)
		return
	}
	p.judge.Store(&judge)
}

// standAtCommit makes the next transaction stop before its COMMIT. standing is closed when it stands there with all its locks; close goOn
// to let it go.
func (p *proxy) standAtCommit() (standing <-chan struct{}, goOn chan<- struct{}) {
	there, leave := make(chan struct{}), make(chan struct{})
	var once sync.Once
	p.on(func(statement string) verdict {
		if statement == "COMMIT" {
			once.Do(func() { close(there) })
			<-leave
		}
		return pass
	})
	return there, leave
}

// cut breaks every connection.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// seen gives the statements since the last call.
func (p *proxy) seen() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.statements
	p.statements = nil
	return list
}

func (p *proxy) accept() {
	for {
		client, err := p.lis.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.server) //nolint:noctx // ended by Close
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns[client], p.conns[server] = true, true
		p.mu.Unlock()
		var mute atomic.Bool // the server's answer is to be lost
		p.wg.Go(func() {
			p.forward(client, server, &mute)
			_ = client.Close()
			_ = server.Close()
		})
		p.wg.Go(func() {
			answer(server, client, &mute)
			_ = client.Close()
			_ = server.Close()
			p.mu.Lock()
			delete(p.conns, client)
			delete(p.conns, server)
			p.mu.Unlock()
		})
	}
}

// forward passes on what the client sends, packet by packet.
func (p *proxy) forward(client, server net.Conn, mute *atomic.Bool) {
	const query, prepare = 0x03, 0x16
	head := make([]byte, 4)
	for {
		if _, err := io.ReadFull(client, head); err != nil {
			return
		}
		size := binary.LittleEndian.Uint32([]byte{head[0], head[1], head[2], 0})
		packet := make([]byte, 4+size)
		copy(packet, head)
		if _, err := io.ReadFull(client, packet[4:]); err != nil {
			return
		}
		// Sequence number 0 begins a command; the packets of the handshake have higher ones.
		if head[3] == 0 && size > 1 && (packet[4] == query || packet[4] == prepare) {
			statement := strings.Join(strings.Fields(string(packet[5:])), " ")
			p.mu.Lock()
			p.statements = append(p.statements, statement)
			p.mu.Unlock()
			if p.rewrite != nil && packet[4] == query {
				text := p.rewrite.Replace(string(packet[5:]))
				packet = append(packet[:5:5], text...)
				binary.LittleEndian.PutUint32(packet, uint32(len(text)+1)) // the highest byte is the sequence number, 0
			}
			if judge := p.judge.Load(); judge != nil {
				switch (*judge)(statement) {
				case cutBefore:
					return
				case cutAfter:
					mute.Store(true)
				case pass:
				}
			}
		}
		if _, err := server.Write(packet); err != nil {
			return
		}
	}
}

// answer passes on what the server sends. A muted answer is waited for, so that the server is known to have done the statement.
func answer(server, client net.Conn, mute *atomic.Bool) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := server.Read(buffer)
		if err != nil || mute.Load() {
			return
		}
		if _, err := client.Write(buffer[:n]); err != nil {
			return
		}
	}
}
