"""Tables of GGUF's IQ types: the points of a grid that an index stands for. They are data of the format.

A point is a number in base 3 or 8 with its first coordinate as the lowest digit. A table is the low bytes of all
numbers, then the high ones, compressed.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache

import torch
from torch import Tensor

# Coordinates that the digits stand for.
_COORDINATES = {
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1_S": (-1, 0, 1),
}
_POINTS = {
    "IQ2_XXS": (
        "c-muNVqxRp;t>*&kdl#8(b6+8v#|3D3W<u#>6*4^$+lZxzWrh2;1dv0(9$uob8+(uOR1=8nKN(0xd+c)z4`QyiG_<t$ttL8%B?$(-h5#"
        "bl916du<;8^m@w<irF)OwG3of^)f_l<;?_3-k%+cUTXtP|@Zyz>N=VqU73&V1`zEB;HgDCfh@QSFv*s;Wwr0zYLq|^CdB-Irre_8;qpo"
        "GbmLs>GC=``c^-MVQ=EE<epp>k<lCoI~c3fg`n>J&^F9olVsH$zB9NZ!b`nJ8}F)-=s+2tT6A!p>5Rn~L}=qoW5v#6>$n~vT17qH^f4;"
        "C&9zp@RFzA;4bSe$ypq>y#$5)%Vqz=#Jhp#Wxdzyb%X2*3sh>|nrw1~^dx7aVXS01p`OLI58G@PmPXAPfj017RQ#fdWxcF(42J0tra~B"
        "gK8>"
    ),
    "IQ2_XS": (
        "c-pPe@n@m|7zgn8-s|4$x^CBXyRJJ)l4O!3Gc(B~uS`yo%sH7PNs`QDlH??l*UTg{uS_yYGD#-M%p^%>CMQXfB$*`1-22{TTbsM<hx_~"
        "i-{*P04*(J%B8falq0ZCj3?_@s;qn#)!o{WK73r!RR;e}G^{?M_8+wD;Vzq5<IXzw<5;_V;qOp@q_B?-G>ko#b@ht#CL_CE4nZa7%i)3"
        "<Gq5PuJZ5VBi{lH-~o+vh3?M}CMGaQ2i5``haCP-BlyEljyN|hhgTD{S1b-H-iEdXIj^aZ{^C|+EV!%Cgmvh8$v_9KO2seE-^ZMD0-G0"
        "0?bmn;q>o4d$Ynj^~m>i2l!B$-N|X3mPGtJa7Bk(nH^+UN^~Be6_&KxM4J+P%ObdYrwiGkDT9?3x`vvb(n*2p*#0$Z<3lPoz$BXL)>^W"
        "~)0K0aO|n??MhcU2g1fKN36$on%Yp>qeW#;z?vSyJH6lpt(Y=IiTqcMw7+5x$Sa$gUM7TS1LmstUaB{=JBJEShYdsuPQVK3ldGHxDu&c"
        "t2bi{^g)(T;yXYK9IY?k>C^B6**u|0yu7Bw6U|ol&TcB-?Ew&pj6I37C|}<Sr)y)7$`gqds>Efb-oa`m(Ros}HC?PX0f@Y2v!f$6>^Zu"
        "~7fY2oMItj`K^`=5b?Xl$v$^xZ7+hL5nh+HDPoB*V{FmpmAWVDl1oX(uhln$I^%tbaUOz>i_U7K)y|)vTU*7!@^^y0}=I?x%pxycS0Da"
        "=qZ$AN1kP2r"
    ),
    "IQ2_S": (
        "c-pm-ab%)#9LBrduIqMPx9hsDn>jN{CP|V>W|B#gOp;_yk|c97$s{wGNis8&Ns`P=W|GXz%p@~OlFTHNB$LTxGMW4S-nZ_Y?QF~L^LIV"
        "(^L?J@N9gM(k_O0>K`M>T82&yo%4D&}xIDf<I4%-TN@NPvv|6Lp>1TczP1f0;HoIfq=~{FzdsbH0HUi<u=2mnkesFknoJ^gb6)!6F=1u"
        "FieMji~qdJ7ij&VR$I4+)$PRZm7C6d+Ye;AA=v&A}Vn*-Ga_mX$rzYz$AcjJlugX452U#(r%8`mJ&CUkw$=))syFgGcYPRXY=TK$Z1*1"
        "o*D76^r-ne$@lqFkxg>Q@cq<F4~BumQJqJYbhiOiH>ov^wO%V#Ut#t*mc^!m;>%I+M*6&OonR0S{Nm#BCd?ktwuJN*o>^DM_SqwMGvoI"
        "OZ2T-qi?}#YsAoLuM+~`b`U^Ff=^M;R>WWqs8fo#S?p2Wbmsje571!G(j4Uqk}Yij3*LH)Os_-;#gS?Z*FZzcVh9qeJta2u2`yo6+$10"
        "N*iKxWO9|k=7%EUiGu<-z2-=i7Q4gigMP3uL%6^$`Y42&Jk4bD1r$>izYA}xpEy9q7r^B5P(aYUa$2o3np_Ku?xkf9E{N&jorBupQ7W6"
        "ucT&2<GH*jd6co=GhYwY2tSA<|S`b+G2e)_ebn>N(YKsVEa?t`{SaWDu-EX071w)ZdWEl(U6n*HtSgv0+iKtHolqnKpyTr;ve|NgvP#>"
        "PwelnFVL1BY5R5J8qGSAu<0>Mb4-e!q9?W?9?JqDx2?nKA=H$vOdSTbL(-ICZmfe<oKDAlG#w<i#ZALnRH7DsKK^OY%R(IcZQHis`jLy"
        "{^~8g1u<c_%u+>kEd!`T-b+sDD2${ACH@QFWe^-QimCLzKx>n?NKnhDN58Dzhtga$2Z0uCZs--&s71&7G9W6|i+HL=!FH8*knbhzyoMC"
        "{{Y0?nu0FR;o9cESVy4lFsIf@S8f7A&^^bFl-nBOfFey5y``giByXv(r67vvo}QeKfHQr`g-E^%hKN)Z=L}0nY{fMq#k(patu6&_q{-V"
        "1|J@R@+co4V6e-lXF`1npC5+y2w(0&|BJ8pVBmb~@(Vd153K"
    ),
    "IQ3_XXS": (
        "c-muNV&UZG7Z8$EvbJ?}_V5Y}jfhIjsc2|w>6|cW=Ir?^*Y7=e{KToNKe**p^nps;qq631IdSIP<ByEY99)9J5>hhi8V*jL0YQz;9bFS"
        "=>^gAh!p&#j7+Ey}LeeT*FFjyj;^Y<(5|dPNban+AA5mNmG`zEa!ld~N)*d`@=EomdZRhaBnuCYWJ!J$Ls9|d5;1m#<k_I$y>Z)BQZ%e"
        "3KIk*Mo_RQOS`vVKVth}~<&4l?2Hf%foltt4dG`ZsFiBmVY6fGRw!g70N?K<?DLs;C(DRRY?M<Oa}CV_?hTW;J_am|{2_#!haJBO53SV"
        "Gs*RR_-A{vfF6;1n{0fmpzZ4w&!(W;kFW1X$sK4J%+r0vsrS6ArkL05=TqzyU89@Sy^JFaQ9yoNsX"
    ),
    "IQ3_S": (
        "c-muNWMXCK;N;@r6A%=YR!~w^*VHyJvb3>xaCCC<@bnD`4v&mYDJ-pOXl!lo=<b_1b;g`UOP8-)y<_*`lV>knx_SHFlNYbP|NP6q%`Ye"
        "-rJ$^7;p7q!6c(MBnqF4j*4aIC)y@Nlj$F8O?e>c|42(=H9Gu*|`~pIfGIBb4hE@)a&Tbw)ff3P(8Cex|4PCwc6Q;~suz2l;T?daGKXL"
        "lv^&58{e)_@8%Ecoot)!-*<LKcX7!j2@VaoI+%MKnsaq8k-pfm#`Gtdt}F9-^YOGqgyt7>SOTUgsVIC*&c2Zct)BxN?Xv`?HoWB$U`>v"
        "!%saOmjCOIL2*e)QrSBfEgGl&qqat&3++d_s0bLsR?2wHuF~ymsU93nq{|g(RhAl~mL<jV&FWU3~(B6AG$;j+`)S&WeL4&Ro2F{l>$`&"
        ")@!L=HwHS)G{z}^zaIeO3AD4TX^vBg-drCShxg4#HAE9ES%guy@MiRlQVN0n>%_Z&R(#7(~cu2PXj~mE(4Q@yn>~xdtg!boDC<=-gx|y"
        "iGxQ-K}B85%m!$uS720CL+9if^Hv`^e&YI*mtTJ~vIt12d4*+WFFJJO63~s3(gqFz;U!&j7Oma1<G`7V4@8xX9GqhcS{Ix=&A`GgAS9="
        "tW8~x+lAPMu($P0@#>zvt?!IPZ<rdHgN@|*UfPq?okqE#<CSb-7SjYvecmNymfE_#FAO>(^051H18yWCm0lWynhYRq-0RTv`;d%"
    ),
    "IQ1_S": (
        "c-qZXX+Vr?6rPr8n`%_1MUpWk=_XyWCmC&ol%$f8q7p(vMktX)$w*RZA+2*mDj{uZT2<O5ZPG?bipn(iyx(yD-X9J3KL5Y-p7U%Uj$cq"
        "nL`*_@y8H}fRW)_(CCgT=rW&u`WVY4P){bVs+v&hz_v4;kXS~n(1_U!gB4h6+B&9yec=9ZdRq?96@%7ubj;@}*51&4>Ieel-lA<z2Wzl"
        "jy10!RTEf$t`GzTYV7uWp<+zz{Y9QUOA`uPW33A!50h>3fUmi06{C%=GIQd!r~{J!VI!0@;6NgSR)l$$wgj*9w%g^QQ0)TbJmZnUu7LE"
        "Gcx3ZHwOyLc(^YRIjK=-7B>T1M9M-24|sWmT|7M`u^>z~IPNHlKj7sF;L;qS72y4NWcWMLJ8D>*`TWHg4K%w#D4S(#qDs^?<v_c|ZT)8"
        "{v^LcjDrcndz_xtD?H5v8nk@YiCdYhmV6p!(T?ePOv$6QGz5<N?L{_C$FeX272cI9J+Fq?po?P14Cnz4KN!{-DYKNyTgvQ%ih6pkCThr"
        ";Un(!Q^4AJ|A5O^f`S=0LT`pe+>VNgy_1-d`XDR2q@u35rM11YyO;ak7>ADlTazhsH5X`U>nvS{UeGt#Xa=LL?P$(!$4-C*uy;TZBP2W"
        "~F5%&$$4_!z6cv}2S2wh@b@ucPd>R@5K8fQOmLSR~%qDZsU#z3M*2rYDrOl3=_IsW8A9M#L&j(z+c0DxWcI@562Wja~3tkkm$|@?W8(O"
        "=%`v->D0-{7IlANN_EOhT89auzHPoHYA!OYys&cVg)s0aP5&xOF7w{AzrC8gYdn3<hZ^0KP7zOCbZ&!^#$F^(vKC?yA{Q08fBE!J7FYR"
        "y{HP3BvzX%2f_4;?vn!pq0^;-#RFuoxyho(UePsIF~%!=<9H|Ks5B2=LA)Acz+hkswORpiPujROe~~<x~^Ih5bG^&ocpmp^;G_-@W)0W"
        "-1IqUdk(CRa8~iG=PjSuB*5I;{XzJ^y{~=aW)4B&JaPnfts=~ldPil2c{)<A6H4x(aL7$ZU-0F10M9#K7N6Wkg#y{OfuRvyP$|wTK2NC"
        "x~`$ArM;`W2iq53_{!!8;Dv+<urC<~!aS;xC0G`m?{?S&h36dC1|gwQG4Y8hOyvD%uy8)ceL0X{Qwu|1!{TpS+uA$3-gozY1UG*hn_%<"
        "dg$YtJKqy63U4!e5H3mi|rW?1|*dnj(b=rre>)3J6lk`)k&z$x4Id}eo-$e)-BP2BJR(ND|?49_;q+~?Y!?Z`~8IOUi=Q(-sb`h(%q_n"
        ")^Wo1?ME7+jE5nG|Py#p5L=>ua9U_lrgpZGq>!NH9{ptyu2ahjAgNnT-w;!LGk%CpIHC@Lr!n#gTSmM&klhH7AFWQ?W4%G%Bm$V6#4>V"
        "X#Y!3uy877-Z**-J=Fevp~<1hmV=xF}+kAU0mrH8x{JbPs+WV^8u6;0Y3vQqxJY$O~l3d`+!|K(jt1&%)Lo2*6%A>g^9P1HEEm<Kmh3("
        "=sx%a&ik;<zVdQ7GQIHf&==CD=1SmR;<)r4b1}Iqu^R?$AW9`vhSZg>1R;T0)v91qLIfE5|dI8cj?c7Hc+g%3@EE@YJG<cFf{y=AOXCH"
        "nE15mvU2h>l$7UaLkl8DL1>&0c^voh=2jo$I;;rS$HajTP<V0+Dr;(y`N2vfqhmN>F>z^G`I)ok&0nxkX9e=65tg5wyBznrq89Z+W<n)"
        ";EfkKuo0!Z@d;H{iZeeM8)vK1)&fbAfUq&Zz{6Zom1y!{L+Nc0GYzCg3(AUS{Hq0R0Rsw^BM@Gd%eDYW&a8yk_Si7yO|MTegNq#|5Nw`"
        "K{kxWt3T=?hWWh?a78Ll_oVh%;;fKl%50hR0*%m}+3efM7S{f8NkvkMAYwe_#xv}1h^+HvsQHlV1eqpU%pgLk>KTience`Lgy?#(?a1U"
        "flBm0Ju2g=IB$ZJkg`gF|C%Jk&aP53DBx)dGgo&|ZYKu-+Pdsv*Q-Ggj~0t!+Teoiwb4K~Rtr3x*d~o>zjeL+gX0ASg36J@Z+1UOt!(;"
        "@8yK)ju=>ahv4B3lT{Qie&X4O^^By+ZyY6cme*3Q1CFC?t2CC2U21tE-rmpRrmT$TSqr4g-M*C5Mdf9sWh8{(y@HyYHW(db{jj|{zFIH"
        "PoDPi^+#PE9eXc<iQ2rZx}m8Req`Of5WK+=)P3C4qhKvXOBiC@**m!&JmgOII*W3C>GI78FzLO7q`&Sz%E-+xDz1ShdH25W!_err?~?)"
        "qqBKd7qNV}qTun7I-?n|Xqw_wn_=Ss?0~x5qal8ZH)WJVh2=EkwzY%zzKxoPko+3ne08!pU?3aS@%OL)Lfy93WNnU~YYcY)%km3!brw$"
        "pOU^<UL`dyIa5#*){d0s%_U-35)c4C<"
    ),
}


@cache
def grid(name: str) -> Tensor:
    """The points of a type's grid, int8 [points, coordinates]."""
    values = torch.tensor(_COORDINATES[name], dtype=torch.int8)
    stored = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(_POINTS[name]))), dtype=torch.uint8).int()
    low, high = stored.view(2, -1)
    base = len(values)
    powers = base ** torch.arange(8 if base == 3 else 4)
    return values[(low | high << 8)[:, None] // powers % base]
