package lapsetest

import (
	"net"
	"sync"
	"sync/atomic"
)

// gateKeeper is what freezes the connections of a Broker: nil when they flow,
// otherwise a channel that is closed by Thaw.
type gateKeeper struct{ frozen atomic.Pointer[chan struct{}] }

func (g *gateKeeper) freeze() {
	ch := make(chan struct{})
	g.frozen.CompareAndSwap(nil, &ch)
}

func (g *gateKeeper) thaw() {
	if ch := g.frozen.Swap(nil); ch != nil {
		close(*ch)
	}
}

// pass returns true once nothing is frozen, false if stop comes first.
func (g *gateKeeper) pass(stop <-chan struct{}) bool {
	for {
		ch := g.frozen.Load()
		if ch == nil {
			return true
		}
		select {
		case <-*ch:
		case <-stop:
			return false
		}
	}
}

// listener hands out connections that the Broker can freeze and count.
type listener struct {
	net.Listener
	b *Broker
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.b.countConn(1)
	return &conn{Conn: c, b: l.b, closed: make(chan struct{})}, nil
}

// conn withholds its bytes in both directions while the gate is closed. The
// kernel goes on accepting what the peer sends, as it does for a stopped process.
type conn struct {
	net.Conn
	b      *Broker
	once   sync.Once
	closed chan struct{} // closed by Close
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if !c.b.gate.pass(c.closed) {
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	if !c.b.gate.pass(c.closed) {
		return 0, net.ErrClosed
	}
	return c.Conn.Write(p)
}

func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		c.b.countConn(-1)
	})
	return c.Conn.Close()
}
